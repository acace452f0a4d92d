// The files that the program sees: a read-only tree of the files named in the options, and a /tmp of its own.
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "sandbox.h"

namespace {

constexpr const char* kOld = "/old";

// From <linux/mount.h>, which older systems lack and newer ones cannot include together with <sys/mount.h>.
struct MountAttributes {
  uint64_t set, clear, propagation, user_namespace;
};
constexpr uint64_t kReadOnly = 1, kNoSuid = 2, kNoDevices = 4, kNoExec = 8;
constexpr long kMountSetattr = 442;  // on all architectures
constexpr unsigned kRecursive = 0x8000;

void make_parents(const std::string& path) {
  for (size_t at = path.find('/', 1); at != std::string::npos; at = path.find('/', at + 1)) {
    mkdir(path.substr(0, at).c_str(), 0755);
  }
}

// Makes a mount and all mounts below it read-only; remounting with mount() would leave those below it writable.
void protect(const Options& options, const std::string& path, bool device) {
  MountAttributes attributes{kReadOnly | kNoSuid | (device ? kNoExec : kNoDevices), 0, 0, 0};
  if (syscall(kMountSetattr, AT_FDCWD, path.c_str(), kRecursive, &attributes, sizeof attributes)) {
    fail(options, "mount_setattr (Linux 5.12) of " + path);
  }
}

void bind(const Options& options, const Pair& pair) {
  const std::string source = kOld + pair.first;
  struct stat state;
  if (stat(source.c_str(), &state)) fail(options, "stat " + pair.first);
  make_parents(pair.second);
  if (S_ISDIR(state.st_mode)) {
    mkdir(pair.second.c_str(), 0755);
  } else {
    close(open(pair.second.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0444));
  }
  if (mount(source.c_str(), pair.second.c_str(), nullptr, MS_BIND | MS_REC, nullptr)) {
    fail(options, "bind " + pair.first);
  }
  protect(options, pair.second, S_ISCHR(state.st_mode));
}

void copy(const Options& options, const Pair& pair) {
  make_parents(pair.second);
  const int from = atoi(pair.first.c_str());
  const int to = open(pair.second.c_str(), O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0555);
  if (to < 0) fail(options, "create " + pair.second);
  char buffer[1 << 16];
  ssize_t size;
  for (off_t at = 0; (size = pread(from, buffer, sizeof buffer, at)) > 0; at += size) {
    if (write(to, buffer, size) != size) fail(options, "write " + pair.second);
  }
  if (size < 0) fail(options, "read " + pair.second);
  close(to);
  close(from);
}

void mount_tmpfs(const Options& options, const char* path, const std::string& settings, unsigned long flags) {
  if (mount("tmpfs", path, "tmpfs", flags | MS_NOSUID | MS_NODEV, settings.c_str())) {
    fail(options, std::string("tmpfs on ") + path);
  }
}

void mount_tmp(const Options& options) {
  const std::string size = std::to_string(options.tmp_size), files = std::to_string(options.tmp_files);
  mount_tmpfs(options, "/tmp", "size=" + size + ",nr_inodes=" + files + ",mode=1777", MS_NOEXEC);
}

}  // namespace

void make_root(const Options& options) {
  if (mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr)) fail(options, "private mounts");
  mount_tmpfs(options, "/tmp", "size=256m,nr_inodes=4096,mode=755", 0);
  mkdir("/tmp/old", 0700);
  if (syscall(SYS_pivot_root, "/tmp", "/tmp/old") || chdir("/")) fail(options, "pivot_root");
  umask(0);
  for (const Pair& pair : options.binds) bind(options, pair);
  for (const std::string& path : options.hidden) mount_tmpfs(options, path.c_str(), "size=4k,nr_inodes=2", MS_RDONLY);
  for (const Pair& pair : options.links) {
    if (symlink(pair.first.c_str(), pair.second.c_str())) fail(options, "symlink " + pair.second);
  }
  for (const Pair& pair : options.files) copy(options, pair);
  mkdir("/tmp", 0755);
  mount_tmp(options);
  if (umount2(kOld, MNT_DETACH) || rmdir(kOld)) fail(options, "unmount the old root");
  const unsigned long flags = MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV;
  if (mount(nullptr, "/", nullptr, flags, nullptr)) fail(options, "read-only root");
}
