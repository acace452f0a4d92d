// Process 1 of the sandbox: starts the program without any privileges, and reports how it ended.
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>

#include "sandbox.h"

namespace {

constexpr int kNobody = 65534;

void limit(const Options& options, decltype(RLIMIT_CPU) kind, long most) {
  rlimit now;
  if (getrlimit(kind, &now)) fail(options, "getrlimit");
  const rlim_t value = now.rlim_max == RLIM_INFINITY || rlim_t(most) < now.rlim_max ? rlim_t(most) : now.rlim_max;
  now = {value, value};
  if (setrlimit(kind, &now)) fail(options, "setrlimit");
}

void drop_rights(const Options& options) {
  if (geteuid() == 0 && setgroups(0, nullptr)) fail(options, "setgroups");
  if (setresgid(kNobody, kNobody, kNobody) || setresuid(kNobody, kNobody, kNobody)) fail(options, "setresuid");
  __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct none[2]{};
  if (syscall(SYS_capset, &header, none)) fail(options, "capset");
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) fail(options, "no_new_privs");
}

// If the machine runs out of memory, the kernel shall kill the program, not its guard.
void offer_to_oom_killer(int proc) {
  const int file = openat(proc, "self/oom_score_adj", O_WRONLY | O_CLOEXEC);
  if (file < 0 || write(file, "1000", 4) < 0) return;  // a failure does not affect isolation
  close(file);
}

// RLIMIT_CPU. The kernel counts the clock ticks at which it finds the process running, on a busy machine up to twice
// the time that it ran. So without forks this limit is only a fallback: `wait_for` compares the program's own clock,
// which is exact, with the real limit. With forks it is the only limit of the program's children.
long processor_limit(const Options& options) { return options.forks ? options.seconds : 2 * options.seconds + 1; }

[[noreturn]] void become_program(const Options& options, int proc) {
  setsid();
  offer_to_oom_killer(proc);
  limit(options, RLIMIT_CORE, 0);
  limit(options, RLIMIT_MEMLOCK, 0);
  limit(options, RLIMIT_MSGQUEUE, 0);
  limit(options, RLIMIT_SIGPENDING, 64);
  limit(options, RLIMIT_CPU, processor_limit(options));
  limit(options, RLIMIT_AS, options.memory);
  limit(options, RLIMIT_NOFILE, options.open_files);
  limit(options, RLIMIT_FSIZE, options.file_size);
  limit(options, RLIMIT_NPROC, options.processes + 1);  // the guard counts too, if it has the same user
  drop_rights(options);
  umask(022);
  if (chdir("/tmp")) fail(options, "chdir");
  std::vector<char*> environment;
  for (const std::string& variable : options.environment) environment.push_back(const_cast<char*>(variable.c_str()));
  environment.push_back(nullptr);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  if (!filter_system_calls(options.forks)) fail(options, "seccomp");
  execve(options.command[0], options.command, environment.data());
  _exit(127);  // a program that the kernel cannot execute counts as one that fails
}

// Has the next exec close all descriptors but the standard three.
void hide_descriptors(const Options& options) {
  constexpr long close_range = 436;
  constexpr unsigned at_exec = 4;
  if (syscall(close_range, 3U, ~0U, at_exec)) fail(options, "close_range (Linux 5.11)");
}

double seconds_of(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return now.tv_sec + now.tv_nsec * 1e-9;
}

// Waits until the program ends ("ended"), its wall time is over ("wall") or its processor time is over ("time").
const char* wait_for(pid_t program, const Options& options, const sigset_t& children, int* code, rusage* used) {
  clockid_t clock;
  if (clock_getcpuclockid(program, &clock)) fail(options, "clock_getcpuclockid");
  const double end = seconds_of(CLOCK_MONOTONIC) + options.wall;
  const double processors = sysconf(_SC_NPROCESSORS_ONLN);
  for (pid_t waited; (waited = wait4(-1, code, WNOHANG, used)) != program;) {
    if (waited > 0) continue;  // an orphan of the program's
    const double wall = end - seconds_of(CLOCK_MONOTONIC), processor = options.seconds - seconds_of(clock);
    if (wall <= 0) return "wall";
    if (processor <= 0) return "time";
    const double sleep = std::min(wall, std::max(processor / processors, 0.01));
    const timespec left{time_t(sleep), long(1e9 * (sleep - time_t(sleep)))};
    sigtimedwait(&children, nullptr, &left);
  }
  return "ended";
}

}  // namespace

void guard(const Options& options, int proc) {
  sigset_t children;
  sigemptyset(&children);
  sigaddset(&children, SIGCHLD);
  sigprocmask(SIG_SETMASK, &children, nullptr);
  hide_descriptors(options);
  const pid_t program = fork();
  if (program < 0) fail(options, "fork");
  if (!program) become_program(options, proc);
  const int nothing = open("/dev/null", O_RDWR | O_CLOEXEC);
  for (int end = 0; end < 3; ++end) dup3(nothing, end, O_CLOEXEC);  // so that pipes close when the program ends
  int code = 0;
  rusage used{};
  const std::string ended = wait_for(program, options, children, &code, &used);
  if (ended != "ended") {
    kill(program, SIGKILL);
    wait4(program, &code, 0, &used);
  }
  const auto microseconds = [](const timeval& time) { return time.tv_sec * 1000000L + time.tv_usec; };
  const std::string text = ended + " " + std::to_string(code) + " " +
      std::to_string(microseconds(used.ru_utime) + microseconds(used.ru_stime)) + " " +
      std::to_string(used.ru_maxrss) + "\n";
  _exit(write(options.status, text.data(), text.size()) == ssize_t(text.size()) ? 0 : 1);
}
