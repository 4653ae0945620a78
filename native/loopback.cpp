// What keeps a job of one machine off the network: bind() for the processes of an MPI launcher (LD_PRELOAD), in which
// "every interface" is the loopback interface.  mpiexec and prterun have no option for that.  Ranks inherit it, but
// what a script binds is its own affair: it does nothing in any other program.  The kernel is asked directly, as dlsym()
// would tie the library to glibc >= 2.34.
#include <errno.h>
#include <initializer_list>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

static bool is_launcher() {
  for (const char *name : {"mpiexec", "mpirun", "hydra", "prte"})
    if (!strncmp(program_invocation_short_name, name, strlen(name))) return true;
  return false;
}

extern "C" int bind(int fd, const sockaddr *address, socklen_t length) noexcept {
  union { sockaddr any; sockaddr_in v4; sockaddr_in6 v6; sockaddr_storage all; } local = {};
  if (!is_launcher() || length > sizeof local) return syscall(SYS_bind, fd, address, length);
  memcpy(&local, address, length);
  if (local.any.sa_family == AF_INET && local.v4.sin_addr.s_addr == htonl(INADDR_ANY))
    local.v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (local.any.sa_family == AF_INET6 && IN6_IS_ADDR_UNSPECIFIED(&local.v6.sin6_addr))
    local.v6.sin6_addr = in6addr_loopback;
  return syscall(SYS_bind, fd, &local.any, length);
}
