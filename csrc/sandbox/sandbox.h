// The launcher of megarl.rewards.sandbox: runs one program where it can reach nothing, and says how it ended.
//
//   supervisor (outside)          waits for all of the rest; SIGTERM makes it end them
//     guard (process 1 inside)    limits the time; when it ends, the kernel kills whatever is left inside
//       program                   without rights, under a filter of system calls and under limits of resources
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

struct Pair {
  std::string first, second;
};

struct Options {
  int status = -1;           // descriptor that the outcome is written to
  pid_t parent = 0;          // who started the supervisor
  long seconds = 0;          // processor time of the program
  long wall = 0;             // seconds from its start to its end
  long memory = 0;           // bytes of address space of a process
  long processes = 0;        // and threads, together
  long open_files = 0;       // of a process
  long file_size = 0;        // bytes of a file
  long tmp_size = 0;         // bytes of all files in /tmp
  long tmp_files = 0;        // their number
  bool forks = false;        // whether the program may start processes, beside threads
  std::vector<Pair> binds;   // outside -> inside, read-only
  std::vector<Pair> links;   // inside: target -> name
  std::vector<Pair> files;   // descriptor with the content -> name inside
  std::vector<std::string> hidden;       // directories inside that are to look empty
  std::vector<std::string> environment;  // NAME=value
  char** command = nullptr;
};

// Writes "failed WHAT: why" to options.status and ends the process: the sandbox failed, not the program.
[[noreturn]] void fail(const Options& options, const std::string& what);

void die_with(const Options& options, pid_t parent);  // 0: the parent cannot be seen from here

void make_root(const Options& options);                       // root.cpp, as the next
void mount_tmp(const Options& options);
[[noreturn]] void guard(const Options& options, int proc);    // guard.cpp; proc: directory of an outer /proc, or -1
bool filter_system_calls(bool forks);                         // filter.cpp; false and errno on failure
