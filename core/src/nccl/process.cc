// SPDX-License-Identifier: Apache-2.0
#include "nccl/process.h"

#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <sstream>
#include <string>

namespace sok::nccl {
namespace {

struct Stat {
  char state = 'X';
  uint64_t start_time = 0;
};

// Fields 3 and 22 of /proc/PID/stat. The name in field 2 may hold spaces and parentheses: what follows its last ')' is
// read. False when there is no such process.
bool read_stat(int64_t pid, Stat* stat) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  if (!std::getline(file, line)) return false;
  const size_t name_end = line.rfind(')');
  if (name_end == std::string::npos) return false;
  std::istringstream fields(line.substr(name_end + 1));
  std::string skipped;
  if (!(fields >> stat->state)) return false;
  for (int field = 4; field < 22; ++field) fields >> skipped;
  return static_cast<bool>(fields >> stat->start_time);
}

uint64_t hash_of(const std::string& text) {  // FNV-1a
  uint64_t hash = 14695981039346656037u;
  for (const unsigned char c : text) hash = (hash ^ c) * 1099511628211u;
  return hash;
}

}  // namespace

Process this_process() {
  Process result;
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot;
  if (std::getline(file, boot) && !boot.empty()) result.host = hash_of(boot);
  struct stat space = {};
  if (stat("/proc/self/ns/pid", &space) == 0) result.pid_namespace = space.st_ino;
  result.pid = getpid();
  Stat own;
  if (read_stat(result.pid, &own)) result.start_time = own.start_time;
  return result;
}

bool can_see(const Process& self, const Process& peer) {
  return self.host != 0 && self.host == peer.host && self.pid_namespace != 0 &&
         self.pid_namespace == peer.pid_namespace && peer.start_time != 0;
}

bool has_ended(const Process& peer) {
  Stat found;
  if (!read_stat(peer.pid, &found)) return true;
  return found.start_time != peer.start_time || found.state == 'Z' || found.state == 'X';
}

}  // namespace sok::nccl
