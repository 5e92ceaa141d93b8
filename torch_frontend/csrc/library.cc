// SPDX-License-Identifier: Apache-2.0
// The ops of the namespace `sok`: the stages of a process alone (docs/ARCHITECTURE.md), and what is around them; those
// between the exchanges of several are no ops (sharded_lookup.h). Fakes are in ../_ops.py.
//
// Arguments that many ops share:
//   tables       this rank's shards, [slots, dimension] float32, float16 or bfloat16, contiguous; distinct
//   names        one entry a table, for messages
//   keys         one entry a lookup: [n] int32 or int64; key_tables: position in `tables`; combiners: 0 sum, 1 mean,
//                2 sqrtn
//   row_splits   [bags + 1] int64 of the lookups `bagged` names by position; without it each key is a bag of its own
//   weights      [n] float32 of the lookups `weighted` names; without it all are 1
//   members      one number a lookup: how many members of a stack it has, whose keys are slots then, and whose vectors
//                lie side by side, [bags / members, members * dimension]; 0: its table is no stack; []: none is
//   by_key       positions of tables with an index in which the keys of lookups are found; keys of others are slots
#include <torch/custom_class.h>
#include <torch/library.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "dynamic_table.h"
#include "exchange.h"
#include "lookup_function.h"
#include "ops.h"
#include "optimizer_tables.h"
#include "sharded_lookup.h"
#include "table_gradient.h"
#include "table_list.h"

TORCH_LIBRARY(sok, m) {
  // -> one [bags, dimension] float32 a lookup; concat: one for all, with their columns side by side. All tables are
  // whole on this rank. Lists that may be empty may be None, which is what AOTInductor passes for empty ones.
  m.def(
      "gather_combine(Tensor[] tables, str[] names, Tensor[] keys, int[] key_tables, int[] combiners, "
      "Tensor[]? row_splits, int[]? bagged, Tensor[]? weights, int[]? weighted, bool concat=False, "
      "int[]? members=None, int[]? by_key=None) -> Tensor[]");
  // output_gradients: one [bags, dimension] or None a lookup; tables as for gather_combine; generations: one a table
  // where keys are slots that were located, or none -> one [n] float32 for each of `weights`
  m.def(
      "weight_gradient(Tensor?[] output_gradients, Tensor[] tables, str[] names, Tensor[] keys, int[] key_tables, "
      "int[] combiners, Tensor[] row_splits, int[] bagged, Tensor[] weights, int[] weighted, int[] generations=[], "
      "int[] members=[]) -> Tensor[]");
  // keys [n] of members of a stack, in the order of their bags (row_splits; without it each key is a bag) -> slots [n]
  // int64, on one rank. names, first_keys, rows: of the members; stack, num_rows: of the stack
  m.def(
      "locate_members(Tensor keys, Tensor? row_splits, str stack, int num_rows, str[] names, int[] first_keys, "
      "int[] rows) -> Tensor");
  // rows [n] int64, the bag of each entry -> (row_splits [num_bags + 1], order [n], sorted [1] int32)
  m.def("bags(Tensor rows, int num_bags) -> (Tensor row_splits, Tensor order, Tensor sorted)");
  // Fills rows [n, dimension], float32, float16 or bfloat16, with the initial values of keys [n] int64, or of
  // first_key, first_key + key_stride, ...
  m.def(
      "initialize(Tensor(a!) rows, int kind, int seed, float a, float b, Tensor? keys, int first_key, int key_stride) "
      "-> ()");
  // target [slots, dimension]: the row of keys[i] becomes values[i], of target's dtype or float32
  m.def(
      "assign(Tensor(a!) target, str name, int owner, int num_rows, int num_ranks, int rank, Tensor keys, "
      "Tensor values) -> ()");
  // counts [num_ranks, k] int64 as route gave them -> [num_ranks] int64: 1 where the device has found something wrong
  // so far, in stream order; 0 on the CPU
  m.def("error_flags(Tensor counts) -> Tensor");
  // Raises what CUDA device `device` has reported so far, once, as an op on the CPU would have. Does not wait.
  m.def("check_errors(int device) -> ()", &sok_torch::check_errors);
  // Brings rows of dynamic tables to the memory of the device that they are on. Does not wait.
  m.def("prefetch(Tensor[] tables, Tensor[] keys) -> ()", &sok_torch::DynamicTable::prefetch);
  // A table with an index; ../table_parameter.py.
  m.class_<sok_torch::IndexedTable>("IndexedTable")
      .def(torch::init<int64_t, at::Tensor>())
      .def("rows", &sok_torch::IndexedTable::rows)
      .def("locate", &sok_torch::IndexedTable::locate)
      .def("end_step", &sok_torch::IndexedTable::end_step);
  // What a thread holds of tables for several calls; ../turns.py.
  m.class_<sok_torch::Turn>("Turn").def(torch::init<std::vector<at::Tensor>>()).def("end", &sok_torch::Turn::end);
  // A dynamic table of the core; ../dynamic_variable.py.
  m.class_<sok_torch::DynamicTable>("DynamicTable")
      .def(torch::init<std::string, at::Device, int64_t, int64_t, int64_t, at::ScalarType, at::ScalarType, int64_t,
                       int64_t, double, double, std::vector<double>>())
      .def("rows", &sok_torch::DynamicTable::rows)
      .def("add_column", &sok_torch::DynamicTable::add_column)
      .def("follow", &sok_torch::DynamicTable::follow)
      .def("as_indexed", &sok_torch::DynamicTable::as_indexed)
      .def("locate", [](const c10::intrusive_ptr<sok_torch::DynamicTable>& self, const at::Tensor& keys,
                        bool insert) { return self->locate(keys, insert); })
      .def("end_step", &sok_torch::DynamicTable::end_step)
      .def("held", &sok_torch::DynamicTable::held, "", {torch::arg("first") = 0, torch::arg("count") = -1})
      .def("erase", &sok_torch::DynamicTable::erase)
      .def("clear", &sok_torch::DynamicTable::clear)
      .def("read_and_evict", &sok_torch::DynamicTable::read_and_evict)
      .def("set_epoch", &sok_torch::DynamicTable::set_epoch)
      .def("scores", &sok_torch::DynamicTable::scores)
      .def("set_scores", &sok_torch::DynamicTable::set_scores)
      .def("size", &sok_torch::DynamicTable::size)
      .def("candidates", &sok_torch::DynamicTable::candidates)
      .def("set_candidates", &sok_torch::DynamicTable::set_candidates)
      .def("use_times", &sok_torch::DynamicTable::use_times)
      .def("set_use_times", &sok_torch::DynamicTable::set_use_times)
      .def("shrink", &sok_torch::DynamicTable::shrink)
      .def("generations", &sok_torch::DynamicTable::generations)
      .def("counts", &sok_torch::DynamicTable::counts)
      .def("bytes", &sok_torch::DynamicTable::bytes)
      .def("has", &sok_torch::DynamicTable::has);
  // Adds 1 to each number.
  m.def("count_up(Tensor(a!)[] numbers) -> ()");
  // The gradient of a table; ../gradient.py, ../variable.py.
  m.class_<sok_torch::TableGradient>("TableGradient")
      .def(torch::init(&sok_torch::TableGradient::of_table))
      .def_static("of_rows", &sok_torch::TableGradient::of_rows)
      .def("number", &sok_torch::TableGradient::number)
      .def("sizes", &sok_torch::TableGradient::sizes)
      .def("clear", &sok_torch::TableGradient::clear)
      .def("copy", &sok_torch::TableGradient::copy)
      .def("take", &sok_torch::TableGradient::take)
      .def("add", &sok_torch::TableGradient::add)
      .def("scale", &sok_torch::TableGradient::scale)
      .def("is_reduced", &sok_torch::TableGradient::is_reduced)
      .def_static("reduce_unread", &sok_torch::TableGradient::reduce_unread)
      .def("reduce", &sok_torch::TableGradient::reduce, "",
           {torch::arg("name"), torch::arg("num_slots"), torch::arg("dimension"), torch::arg("device"),
            torch::arg("core") = torch::arg::none()});
  // The tables of an optimizer; ../table_step.py.
  m.class_<sok_torch::OptimizerTables>("OptimizerTables")
      .def(torch::init<std::vector<at::Tensor>, std::vector<int64_t>, std::vector<std::string>>())
      .def("waiting", &sok_torch::OptimizerTables::waiting)
      .def("forget", &sok_torch::OptimizerTables::forget)
      .def("set_run", &sok_torch::OptimizerTables::set_run)
      .def("set_states", &sok_torch::OptimizerTables::set_states)
      .def("has_states", &sok_torch::OptimizerTables::has_states)
      .def("common_count", &sok_torch::OptimizerTables::common_count)
      .def("step", &sok_torch::OptimizerTables::step);
  // How tensors of a call travel between its stages; ../exchange.py makes one for each of its own.
  m.class_<sok_torch::Exchange>("Exchange")
      .def(torch::init(&sok_torch::Exchange::make))
      .def("connect", &sok_torch::Exchange::connect)
      .def("tell_of_failure", &sok_torch::Exchange::tell_of_failure)
      .def("agree", &sok_torch::Exchange::agree);
  // The stages of a call on several ranks, for those who carry the messages between them by hand (the tests); a lookup
  // runs them from C++.
  m.class_<sok_torch::ShardedLookup>("ShardedLookup")
      .def("counts", &sok_torch::ShardedLookup::counts)
      .def("keys", &sok_torch::ShardedLookup::keys)
      .def("sizes",
           [](const c10::intrusive_ptr<sok_torch::ShardedLookup>& self) {
             const sok_torch::ShardedLookup::Sizes sizes = self->sizes();
             return std::make_tuple(sizes.send_keys, sizes.receive_keys, sizes.send_rows, sizes.receive_rows);
           })
      .def("gather", &sok_torch::ShardedLookup::gather)
      .def("combine", &sok_torch::ShardedLookup::combine)
      .def("spread", &sok_torch::ShardedLookup::spread)
      .def("gradients", &sok_torch::table_gradients);
  // The tables of a call; how they are found again is in ../call.py.
  m.class_<sok_torch::TableList>("TableList")
      .def(
          torch::init([](std::vector<at::Tensor> tables, std::vector<int64_t> gradients, std::vector<int64_t> positions,
                         sok_torch::Names names, std::vector<int64_t> owners, std::vector<int64_t> num_rows,
                         std::vector<int64_t> member_counts, std::vector<std::string> member_names,
                         std::vector<int64_t> member_first_keys, std::vector<int64_t> member_rows) {
            return c10::make_intrusive<sok_torch::TableList>(
                std::move(tables), std::move(gradients), std::move(positions), std::move(names), std::move(owners),
                std::move(num_rows),
                sok_torch::StackMembers{std::move(member_counts), std::move(member_names), std::move(member_first_keys),
                                        std::move(member_rows)});
          }))
      .def("lookup", &sok_torch::lookup)
      .def("lookup_pairs", &sok_torch::lookup_pairs)
      .def("route", &sok_torch::route_lookups)
      .def("present", &sok_torch::TableList::present)
      .def("device", &sok_torch::TableList::device);
  // What backward() calls for tables whose gradients go through autograd: their PendingGradients. In ../gradient.py.
  m.def("carry(__torch__.torch.classes.sok.TableGradient[] gradients, Tensor[] tables, str[] names) -> Tensor[]");
  // What the class Exchange calls, in ../exchange.py: the methods of Python's Exchange of this number where it has no
  // communicator; and what raises for counts that were swapped, [num_ranks, k] int64, where a rank has failed.
  m.def("exchange(int exchange, Tensor tensor, int[] send, int[] receive) -> Tensor");
  m.def("exchange_counts(int exchange, Tensor counts, bool failed) -> (Tensor sent, Tensor received)");
  m.def("check_swapped(Device device, Tensor sent, Tensor received) -> ()");
  // The CUDA devices whose calls have an error record.
  m.def("error_devices() -> int[]", &sok_torch::error_devices);
  // Sends send_counts[r] elements of `send` [n] to each rank r; what comes goes into `received` [m], of the same dtype
  // and apart from `send`, by source rank. communicator: the address of a sok_communicator of the tensors' CUDA device;
  // 0: there is one rank
  m.def(
      "all_to_all(Tensor(a!) received, Tensor send, int communicator, int[] send_counts, int[] receive_counts) -> ()");
  // What a rank tells the others (../exchange.py): row r of counts [num_ranks, k] int64 on a CUDA device goes to rank r
  // over its communicator, and is waited for -> [2, num_ranks, k] int64 on the CPU: what was sent, with 1 in the last
  // column where the device has found something wrong, and what came
  m.def("swap_counts(Tensor counts, int communicator) -> Tensor", &sok_torch::swap_counts);
  // The ranks whose last column is not 0 in what came, [num_ranks, k] int64 on the CPU.
  m.def("failed_ranks(Tensor received) -> int[]", &sok_torch::failed_ranks);
  // Raises what an op raises when the core returns this status; for tests.
  m.def("check_status(int status) -> ()", &sok_torch::check_status);
}

namespace {

void register_kernels(torch::Library& m) {
  m.impl("gather_combine", &sok_torch::gather_combine);
  m.impl("weight_gradient", &sok_torch::weight_gradient);
  m.impl("count_up", &sok_torch::count_up);
  m.impl("locate_members", &sok_torch::locate_members_of);
  m.impl("bags", &sok_torch::bags);
  m.impl("initialize", &sok_torch::initialize);
  m.impl("assign", &sok_torch::assign);
  m.impl("error_flags", &sok_torch::error_flags);
  m.impl("all_to_all", &sok_torch::all_to_all);
}

}  // namespace

TORCH_LIBRARY_IMPL(sok, CPU, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(sok, CUDA, m) { register_kernels(m); }
