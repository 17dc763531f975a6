// A disk that is slow, or fails, as the file THRESHOLD_FSYNC says: "hold" until it says something else, "slow" for a second,
// "fail", or "ok".
// Preloaded, it stands between a program and the two calls that make a disk write.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static char order(void) {
  char first = 'o';
  const char *path = getenv("THRESHOLD_FSYNC");
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (file >= 0) {
    if (read(file, &first, 1) != 1) first = 'o';
    close(file);
  }
  return first;
}

static int after_orders(long call, int file) {
  const struct timespec moment = {.tv_nsec = 5000000};
  while (order() == 'h') nanosleep(&moment, NULL);
  const struct timespec second = {.tv_sec = 1};
  if (order() == 's') nanosleep(&second, NULL);
  if (order() == 'f') {
    errno = EIO;
    return -1;
  }
  return (int)syscall(call, file);
}

int fsync(int file) { return after_orders(SYS_fsync, file); }
int fdatasync(int file) { return after_orders(SYS_fdatasync, file); }
