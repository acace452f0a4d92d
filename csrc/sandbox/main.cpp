// The supervisor: creates the namespaces and outlives all processes inside.
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "sandbox.h"

namespace {

constexpr int kNamespaces =
    CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP;
constexpr int kNobody = 65534;

Pair split(const std::string& text, char separator) {
  const size_t at = text.find(separator);
  return {text.substr(0, at), at == std::string::npos ? "" : text.substr(at + 1)};
}

long* number(Options& options, const std::string& name) {
  if (name == "seconds") return &options.seconds;
  if (name == "wall") return &options.wall;
  if (name == "memory") return &options.memory;
  if (name == "processes") return &options.processes;
  if (name == "open_files") return &options.open_files;
  if (name == "file_size") return &options.file_size;
  if (name == "tmp_size") return &options.tmp_size;
  if (name == "tmp_files") return &options.tmp_files;
  return nullptr;
}

Options parse(char** arguments) {
  Options options;
  for (; *arguments && strcmp(*arguments, "--"); ++arguments) {
    const Pair option = split(*arguments, '=');
    const std::string& value = option.second;
    if (long* field = number(options, option.first)) *field = atol(value.c_str());
    else if (option.first == "status") options.status = atoi(value.c_str());
    else if (option.first == "parent") options.parent = atoi(value.c_str());
    else if (option.first == "forks") options.forks = value == "1";
    else if (option.first == "bind") options.binds.push_back(split(value, ':'));
    else if (option.first == "link") options.links.push_back(split(value, ':'));
    else if (option.first == "file") options.files.push_back(split(value, ':'));
    else if (option.first == "hide") options.hidden.push_back(value);
    else if (option.first == "env") options.environment.push_back(value);
    else fail(options, "unknown option " + option.first);
  }
  if (!*arguments || !arguments[1]) fail(options, "no command");
  options.command = arguments + 1;
  return options;
}

bool write_file(const std::string& path, const std::string& text) {
  const int file = open(path.c_str(), O_WRONLY | O_CLOEXEC);
  if (file < 0) return false;
  const bool written = write(file, text.data(), text.size()) == ssize_t(text.size());
  const int error = errno;
  close(file);
  errno = error;
  return written;
}

// Maps users: inside, every process is the user nobody. If root makes the sandbox, the guard stays root inside, without
// privileges outside.
void map_users(const Options& options, pid_t child) {
  const std::string folder = "/proc/" + std::to_string(child);
  std::string users = std::to_string(kNobody) + " " + std::to_string(geteuid()) + " 1\n";
  std::string groups = std::to_string(kNobody) + " " + std::to_string(getegid()) + " 1\n";
  if (geteuid() == 0) users = groups = "0 0 1\n65534 65534 1\n";
  else if (!write_file(folder + "/setgroups", "deny")) fail(options, "setgroups");
  if (!write_file(folder + "/uid_map", users) || !write_file(folder + "/gid_map", groups)) fail(options, "user map");
}

// Runs as process 1 of the new namespaces; waits on `supervisor` until it has called `map_users`.
[[noreturn]] void enter(const Options& options, int supervisor) {
  char word;
  if (prctl(PR_SET_PDEATHSIG, SIGKILL)) fail(options, "prctl");
  // It is told only now: if it died before the prctl, this process would outlive it.
  if (write(supervisor, "", 1) != 1) _exit(1);
  if (read(supervisor, &word, 1) != 1) _exit(1);  // it is dead, or has reported why it failed
  close(supervisor);
  const int proc = open("/proc", O_PATH | O_DIRECTORY | O_CLOEXEC);
  make_root(options);
  guard(options, proc);
}

pid_t start_in_namespaces(const Options& options) {
  int ends[2];
  char word;
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends)) fail(options, "socketpair");
  const pid_t child = syscall(SYS_clone, kNamespaces | SIGCHLD, nullptr, nullptr, nullptr, nullptr);
  if (child < 0) fail(options, "new namespaces");
  if (!child) {
    close(ends[1]);
    enter(options, ends[0]);
  }
  close(ends[0]);
  if (read(ends[1], &word, 1) != 1) _exit(1);  // the child has reported why it failed
  map_users(options, child);
  if (write(ends[1], "", 1) != 1) fail(options, "write");
  close(ends[1]);
  return child;
}

// Waits until no process is left. Orphans count too: they become children of the supervisor, which is a subreaper.
void wait_for_all(pid_t child, const sigset_t& signals) {
  for (;;) {
    pid_t ended;
    while ((ended = waitpid(-1, nullptr, WNOHANG)) > 0) {}
    if (ended < 0) return;
    siginfo_t info;
    if (sigwaitinfo(&signals, &info) == SIGTERM) kill(child, SIGKILL);
  }
}

// Has the kernel kill this process when its parent dies; ends it at once if the parent is dead already.
void die_with_parent(const Options& options) {
  if (prctl(PR_SET_PDEATHSIG, SIGKILL)) fail(options, "prctl");
  if (getppid() != options.parent) _exit(1);
}

void reset_signals() {
  for (int number = 1; number < NSIG; ++number) signal(number, SIG_DFL);
}

}  // namespace

void fail(const Options& options, const std::string& what) {
  const std::string text = "failed " + what + ": " + strerror(errno) + "\n";
  if (write(options.status, text.data(), text.size()) < 0) perror(what.c_str());
  _exit(1);
}

int main(int, char** arguments) {
  if (!arguments[1]) {
    fprintf(stderr, "usage: megarl_sandbox name=value ... -- command ...\n");
    return 2;
  }
  const Options options = parse(arguments + 1);
  reset_signals();
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGCHLD);
  sigaddset(&signals, SIGTERM);
  sigprocmask(SIG_SETMASK, &signals, nullptr);
  die_with_parent(options);
  if (prctl(PR_SET_CHILD_SUBREAPER, 1)) fail(options, "prctl");
  wait_for_all(start_in_namespaces(options), signals);
}
