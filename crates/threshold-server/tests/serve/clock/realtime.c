// A wall clock that is off by as many seconds as the file THRESHOLD_CLOCK says.
// Preloaded, it stands between a program and the call that reads a clock. No clock but the wall clock is changed.
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec *time) {
  int failed = (int)syscall(SYS_clock_gettime, clock, time);
  if (failed || clock != CLOCK_REALTIME) return failed;
  const char *path = getenv("THRESHOLD_CLOCK");
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (file >= 0) {
    char text[32] = {0};
    if (read(file, text, sizeof text - 1) > 0) time->tv_sec += atol(text);
    close(file);
  }
  return 0;
}
