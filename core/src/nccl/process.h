// SPDX-License-Identifier: Apache-2.0
// Which process a rank is, and whether it still lives.
#ifndef SOK_NCCL_PROCESS_H_
#define SOK_NCCL_PROCESS_H_

#include <cstdint>

namespace sok::nccl {

// Plain numbers, sent to the peers as they are.
struct Process {
  uint64_t host = 0;           // of this boot of the machine; 0: unknown
  uint64_t pid_namespace = 0;  // in which `pid` counts; 0: unknown
  int64_t pid = 0;
  uint64_t start_time = 0;  // in ticks since boot: a number that is given again belongs to another process
};

Process this_process();

// Whether `self`, which is this process, can see by its number when `peer` ends: the same host and the same namespace.
bool can_see(const Process& self, const Process& peer);

// Whether a process that can be seen has ended; a zombie has.
bool has_ended(const Process& peer);

}  // namespace sok::nccl

#endif  // SOK_NCCL_PROCESS_H_
