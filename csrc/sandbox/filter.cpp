// The filter of the program's system calls: it allows those in a list, some only with certain arguments. All others
// fail as if the kernel did not know them (ENOSYS), so that libraries fall back to calls in the list.
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#include <vector>

#include "sandbox.h"

// Numbers that the headers of older systems lack; they are the same on all architectures.
#ifndef SYS_close_range
#define SYS_close_range 436
#endif
#ifndef SYS_faccessat2
#define SYS_faccessat2 439
#endif

namespace {

#if defined(__x86_64__)
constexpr unsigned kArchitecture = AUDIT_ARCH_X86_64;
#elif defined(__aarch64__)
constexpr unsigned kArchitecture = AUDIT_ARCH_AARCH64;
#else
#error "the sandbox knows the system calls of x86_64 and aarch64"
#endif

constexpr int kAllowed[] = {
    // memory
    SYS_brk, SYS_mmap, SYS_munmap, SYS_mprotect, SYS_mremap, SYS_madvise, SYS_membarrier,
    // files
    SYS_read, SYS_write, SYS_readv, SYS_writev, SYS_pread64, SYS_pwrite64, SYS_lseek, SYS_openat, SYS_close,
    SYS_close_range, SYS_fstat, SYS_newfstatat, SYS_statx, SYS_fcntl, SYS_dup, SYS_dup3, SYS_pipe2, SYS_ftruncate,
    SYS_truncate, SYS_fsync, SYS_fdatasync, SYS_flock, SYS_getdents64, SYS_getcwd, SYS_chdir, SYS_fchdir, SYS_mkdirat,
    SYS_unlinkat, SYS_renameat, SYS_renameat2, SYS_linkat, SYS_symlinkat, SYS_readlinkat, SYS_faccessat, SYS_faccessat2,
    SYS_fchmod, SYS_fchmodat, SYS_utimensat, SYS_umask, SYS_statfs, SYS_fstatfs, SYS_fallocate, SYS_fadvise64,
    SYS_ppoll, SYS_pselect6, SYS_epoll_create1, SYS_epoll_ctl, SYS_epoll_pwait, SYS_eventfd2, SYS_sendfile,
    // the process itself
    SYS_execve, SYS_exit, SYS_exit_group, SYS_getpid, SYS_getppid, SYS_gettid, SYS_getpgid, SYS_getsid, SYS_getuid,
    SYS_geteuid, SYS_getgid, SYS_getegid, SYS_getgroups, SYS_getresuid, SYS_getresgid, SYS_uname, SYS_sysinfo,
    SYS_getrusage, SYS_times, SYS_getrlimit, SYS_setrlimit, SYS_getcpu, SYS_sched_yield, SYS_sched_getaffinity,
    SYS_sched_getparam, SYS_sched_getscheduler, SYS_getpriority, SYS_set_tid_address, SYS_set_robust_list,
    SYS_get_robust_list, SYS_rseq, SYS_futex, SYS_getrandom, SYS_wait4, SYS_waitid, SYS_restart_syscall,
    // signals, which cannot reach processes outside the sandbox
    SYS_rt_sigaction, SYS_rt_sigprocmask, SYS_rt_sigreturn, SYS_rt_sigpending, SYS_rt_sigtimedwait,
    SYS_rt_sigsuspend, SYS_sigaltstack, SYS_kill, SYS_tkill, SYS_tgkill,
    // time
    SYS_clock_gettime, SYS_clock_getres, SYS_clock_nanosleep, SYS_nanosleep, SYS_gettimeofday, SYS_setitimer,
    SYS_getitimer,
    // socket pairs, with which asyncio wakes itself
    SYS_sendto, SYS_recvfrom, SYS_getsockopt, SYS_getsockname, SYS_getpeername, SYS_shutdown,
#if defined(__x86_64__)
    SYS_open, SYS_creat, SYS_stat, SYS_lstat, SYS_access, SYS_readlink, SYS_mkdir, SYS_rmdir, SYS_unlink, SYS_rename,
    SYS_link, SYS_symlink, SYS_chmod, SYS_getdents, SYS_dup2, SYS_pipe, SYS_poll, SYS_select, SYS_epoll_create,
    SYS_epoll_wait, SYS_eventfd, SYS_arch_prctl, SYS_time, SYS_alarm, SYS_pause, SYS_getpgrp, SYS_utimes,
#endif
};

using Filter = std::vector<sock_filter>;

constexpr unsigned kNumber = offsetof(seccomp_data, nr);

// Offset of the lower half of an argument; of the arguments that are compared here, the kernel reads only this half.
constexpr unsigned argument(int index) { return offsetof(seccomp_data, args) + 8 * index; }

void load(Filter& filter, unsigned offset) { filter.push_back(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offset)); }

void answer(Filter& filter, unsigned action) { filter.push_back(BPF_STMT(BPF_RET | BPF_K, action)); }

constexpr unsigned refuse(int error) { return SECCOMP_RET_ERRNO | error; }

void allow(Filter& filter, int call) {
  filter.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, unsigned(call), 0, 1));
  answer(filter, SECCOMP_RET_ALLOW);
}

// Allows a call if the argument has one of these values; otherwise it fails with EPERM.
void allow_if(Filter& filter, int call, int index, const std::vector<unsigned>& values) {
  filter.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, unsigned(call), 0, __u8(2 + 2 * values.size())));
  load(filter, argument(index));
  for (unsigned value : values) {
    filter.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, value, 0, 1));
    answer(filter, SECCOMP_RET_ALLOW);
  }
  answer(filter, refuse(EPERM));
}

// Allows clone for threads, and for processes if `forks`, but never for new namespaces.
void allow_clone(Filter& filter, bool forks) {
  constexpr unsigned namespaces = CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC |
      CLONE_NEWUTS | CLONE_NEWCGROUP | CLONE_PARENT | CLONE_PTRACE;
  filter.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, unsigned(SYS_clone), 0, 5));
  load(filter, argument(0));
  filter.push_back(BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, namespaces, 2, 0));
  filter.push_back(BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, forks ? ~0U : unsigned(CLONE_THREAD), 0, 1));
  answer(filter, SECCOMP_RET_ALLOW);
  answer(filter, refuse(EPERM));
}

}  // namespace

bool filter_system_calls(bool forks) {
  Filter filter;
  load(filter, offsetof(seccomp_data, arch));
  filter.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, kArchitecture, 1, 0));
  answer(filter, SECCOMP_RET_KILL_PROCESS);  // another architecture's numbers mean other calls
  load(filter, kNumber);
  for (int call : kAllowed) allow(filter, call);
  allow_clone(filter, forks);
  if (forks) {
    for (int call : {SYS_setpgid, SYS_setsid}) allow(filter, call);
#if defined(__x86_64__)
    for (int call : {SYS_fork, SYS_vfork}) allow(filter, call);
#endif
  }
  allow_if(filter, SYS_socketpair, 0, {AF_UNIX});
  allow_if(filter, SYS_prlimit64, 0, {0});                // only its own limits: the guard may have the same user
  allow_if(filter, SYS_prctl, 0, {PR_SET_NAME, PR_GET_NAME, PR_GET_DUMPABLE, 0x53564d41 /* PR_SET_VMA */});
  allow_if(filter, SYS_ioctl, 1, {0x5401 /* TCGETS */, 0x5413 /* TIOCGWINSZ */, 0x541B /* FIONREAD */,
                                  0x5421 /* FIONBIO */, 0x5450 /* FIONCLEX */, 0x5451 /* FIOCLEX */});
  answer(filter, refuse(ENOSYS));
  sock_fprog program{static_cast<unsigned short>(filter.size()), filter.data()};
  return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0) == 0;
}
