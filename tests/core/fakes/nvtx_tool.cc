// SPDX-License-Identifier: Apache-2.0
// A tool for NVTX, which the library that NVTX_INJECTION64_PATH names is: it writes the ranges of domains to the file
// that NVTX_TOOL_FILE names, "DOMAIN NAME" where one begins and "DOMAIN" where one ends.
#include <nvtx3/nvToolsExt.h>

#include <cstdio>
#include <cstdlib>
#include <string>

namespace {

void write(const std::string& line) {
  std::FILE* const file = std::fopen(std::getenv("NVTX_TOOL_FILE"), "a");
  std::fprintf(file, "%s\n", line.c_str());
  std::fclose(file);
}

std::string& name_of(nvtxDomainHandle_t domain) { return *reinterpret_cast<std::string*>(domain); }

nvtxDomainHandle_t create(const char* name) { return reinterpret_cast<nvtxDomainHandle_t>(new std::string(name)); }

int push(nvtxDomainHandle_t domain, const nvtxEventAttributes_t* range) {
  write(name_of(domain) + " " + range->message.ascii);
  return 0;
}

int pop(nvtxDomainHandle_t domain) {
  write(name_of(domain));
  return 0;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get_table) {
  const auto* callbacks = static_cast<const NvtxExportTableCallbacks*>(get_table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable functions = nullptr;
  unsigned int size = 0;
  if (callbacks == nullptr || callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &functions, &size) == 0) return 0;
  *functions[NVTX_CBID_CORE2_DomainCreateA] = reinterpret_cast<NvtxFunctionPointer>(create);
  *functions[NVTX_CBID_CORE2_DomainRangePushEx] = reinterpret_cast<NvtxFunctionPointer>(push);
  *functions[NVTX_CBID_CORE2_DomainRangePop] = reinterpret_cast<NvtxFunctionPointer>(pop);
  return 1;
}
