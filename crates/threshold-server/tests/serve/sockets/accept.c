// A listening socket whose `accept` fails with the error number in the file THRESHOLD_ACCEPT, if there is one.
// Preloaded, it stands between a program and the call that accepts a connection.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

int accept4(int socket, struct sockaddr *address, socklen_t *length, int flags) {
  const char *path = getenv("THRESHOLD_ACCEPT");
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (file >= 0) {
    char text[32] = {0};
    ssize_t found = read(file, text, sizeof text - 1);
    close(file);
    if (found > 0) {
      errno = atoi(text);
      return -1;
    }
  }
  return (int)syscall(SYS_accept4, socket, address, length, flags);
}
