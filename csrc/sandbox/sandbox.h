// The launcher of megarl.rewards.sandbox: runs one program in isolation and reports how it ended.
//
//   supervisor (outside)          waits for all other processes; on SIGTERM it kills them
//     guard (process 1 inside)    limits the time; when it ends, the kernel kills all processes left inside
//       program                   without privileges, under a system call filter and resource limits
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

struct Pair {
  std::string first, second;
};

struct Options {
  int status = -1;           // file descriptor to which the outcome is written
  pid_t parent = 0;          // process that started the supervisor
  long seconds = 0;          // limit of the program's processor time
  long wall = 0;             // limit of the time from its start to its end, in seconds
  long memory = 0;           // limit of a process's address space, in bytes
  long processes = 0;        // limit of processes and threads together
  long open_files = 0;       // limit of open files of a process
  long file_size = 0;        // limit of the size of a file, in bytes
  long tmp_size = 0;         // limit of all files in /tmp together, in bytes
  long tmp_files = 0;        // limit of the number of files in /tmp
  bool forks = false;        // whether the program may start processes, and not only threads
  std::vector<Pair> binds;   // outside -> inside, read-only
  std::vector<Pair> links;   // inside: target -> name
  std::vector<Pair> files;   // descriptor with the content -> name inside
  std::vector<std::string> hidden;       // directories inside that appear empty
  std::vector<std::string> environment;  // NAME=value
  char** command = nullptr;
};

// Writes "failed WHAT: why" to options.status and ends the process: the sandbox failed, not the program.
[[noreturn]] void fail(const Options& options, const std::string& what);

void make_root(const Options& options);                       // root.cpp
[[noreturn]] void guard(const Options& options, int proc);    // guard.cpp; proc: directory of the outer /proc
bool filter_system_calls(bool forks);                         // filter.cpp; false and errno on failure
