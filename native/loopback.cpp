// What keeps a job of one machine off the network: bind() for the processes of an MPI launcher (LD_PRELOAD), in which
// "every interface" is the loopback interface.  mpiexec and prterun have no option for that.  Ranks inherit it, but what
// a script binds is its own affair: it does nothing in any other program.
#include <dlfcn.h>
#include <errno.h>
#include <initializer_list>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>

static bool is_launcher() {
  for (const char *name : {"mpiexec", "mpirun", "hydra", "prte"})
    if (!strncmp(program_invocation_short_name, name, strlen(name))) return true;
  return false;
}

extern "C" int bind(int fd, const sockaddr *address, socklen_t length) noexcept {
  static const auto original = (int (*)(int, const sockaddr *, socklen_t))dlsym(RTLD_NEXT, "bind");
  static const bool launcher = is_launcher();
  if (launcher && address->sa_family == AF_INET && length >= sizeof(sockaddr_in)) {
    sockaddr_in here;
    memcpy(&here, address, sizeof here);
    if (here.sin_addr.s_addr == htonl(INADDR_ANY)) here.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return original(fd, (const sockaddr *)&here, sizeof here);
  }
  if (launcher && address->sa_family == AF_INET6 && length >= sizeof(sockaddr_in6)) {
    sockaddr_in6 here;
    memcpy(&here, address, sizeof here);
    if (!memcmp(&here.sin6_addr, &in6addr_any, sizeof in6addr_any)) here.sin6_addr = in6addr_loopback;
    return original(fd, (const sockaddr *)&here, sizeof here);
  }
  return original(fd, address, length);
}
