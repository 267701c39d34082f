// dist_net.h: sockets for a group of processes: connecting, whole messages, and the rendezvous at which every process learns of
// the others. dist.h builds the group on it.
//
// The rendezvous is a star: rank 0 listens, each other rank comes with its number and the port that it listens on itself, and takes
// the table of all members home. That connection stays open, for dist_watch.h. What does not belong (another program, another run)
// is told from a member by the magic number and the group's size and is turned away.
#ifndef LLMC_DIST_NET_H
#define LLMC_DIST_NET_H

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "common.h"

#define DIST_MAGIC 0x51756172u       // "Quar"
enum { DIST_HOST_TEXT = 128 };

typedef struct {
    char host[DIST_HOST_TEXT];       // its name, for messages
    struct in_addr address;          // as rank 0 sees it
    uint16_t port;                   // where it takes connections from the ranks above it
    uint16_t present;
    int32_t local_rank;
} DistMember;

// What a rank says when it comes, and whom it came as.
typedef struct { uint32_t magic; int32_t rank, size; DistMember member; } DistHello;

FN void net_sleep(double seconds) {
    struct timespec t = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    (void)nanosleep(&t, NULL);       // cut short by a signal: the callers look at the clock
}
// No delay for small messages, and not inherited by children.
FN void net_prepare(int fd) {
    const int on = 1;
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    (void)fcntl(fd, F_SETFD, FD_CLOEXEC);
}
FN int net_socket(void) {
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd < 0) fatal("cannot open a socket: %s; raise the limit of open files (ulimit -n)", strerror(errno));
    net_prepare(fd);
    return fd;
}
// Listens on a port of every interface; 0: one that the system chooses, in *port then.
FN int net_listen(uint16_t *port) {
    const int fd = net_socket(), on = 1;
    struct sockaddr_in at;
    socklen_t length = sizeof at;
    memset(&at, 0, sizeof at);
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_ANY);
    at.sin_port = htons(*port);
    (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(fd, (struct sockaddr *)&at, sizeof at) != 0 || listen(fd, 4096) != 0 || getsockname(fd, (struct sockaddr *)&at, &length) != 0)
        fatal("cannot listen on port %d: %s; another run may hold it: use another MASTER_PORT", (int)*port, strerror(errno));
    *port = ntohs(at.sin_port);
    return fd;
}
// Waits for the socket until `deadline` (net_clock). 1: ready; 0: time is up.
FN int net_wait(int fd, short events, double deadline) {
    for (;;) {
        struct pollfd p = {fd, events, 0};
        const double left = deadline - clock_seconds();
        const int rc = poll(&p, 1, left > 0 ? (int)(left * 1000) + 1 : 0);
        if (rc > 0) return 1;
        if (rc == 0 && left <= 0) return 0;
        if (rc < 0 && errno != EINTR) return 0;
    }
}
// All bytes of a blocking socket, each way, until the deadline. 0, or -1: the other end is gone, or time is up.
FN int net_send(int fd, const void *from, size_t bytes, double deadline) {
    for (const char *p = (const char *)from; bytes > 0;) {
        if (!net_wait(fd, POLLOUT, deadline)) return -1;
        const ssize_t n = send(fd, p, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
        if (n <= 0) return -1;
        p += n; bytes -= (size_t)n;
    }
    return 0;
}
FN int net_receive(int fd, void *to, size_t bytes, double deadline) {
    for (char *p = (char *)to; bytes > 0;) {
        if (!net_wait(fd, POLLIN, deadline)) return -1;
        const ssize_t n = recv(fd, p, bytes, MSG_DONTWAIT);
        if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
        if (n <= 0) return -1;
        p += n; bytes -= (size_t)n;
    }
    return 0;
}
FN struct in_addr net_resolve(const char *host) {
    struct addrinfo hints, *found = NULL;
    memset(&hints, 0, sizeof hints);
    hints.ai_family = AF_INET;
    hints.ai_socktype = SOCK_STREAM;
    const int rc = getaddrinfo(host, NULL, &hints, &found);
    if (rc != 0 || !found) fatal("MASTER_ADDR %s: no such host (%s); name the host of rank 0", host, gai_strerror(rc));
    const struct in_addr address = ((struct sockaddr_in *)found->ai_addr)->sin_addr;
    freeaddrinfo(found);
    return address;
}
// A connection to address:port, tried until the deadline: the other may not listen yet. -1 with errno: time is up.
FN int net_connect(struct in_addr address, uint16_t port, double deadline) {
    for (;;) {
        struct sockaddr_in at;
        const int fd = net_socket();
        memset(&at, 0, sizeof at);
        at.sin_family = AF_INET;
        at.sin_addr = address;
        at.sin_port = htons(port);
        // Without waiting: a host that does not answer at all would hold a blocking connect for minutes.
        const int flags = fcntl(fd, F_GETFL);
        int why = 0;
        socklen_t length = sizeof why;
        if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0) fatal("cannot prepare a socket: %s", strerror(errno));
        if (connect(fd, (struct sockaddr *)&at, sizeof at) != 0) {
            why = errno;
            if (why == EINPROGRESS) {
                if (!net_wait(fd, POLLOUT, deadline)) why = ETIMEDOUT;
                else if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &why, &length) != 0) why = errno;
            }
        }
        if (why == 0 && fcntl(fd, F_SETFL, flags) == 0) return fd;
        close(fd);
        if (clock_seconds() >= deadline) { errno = why; return -1; }
        net_sleep(0.05);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The rendezvous

FN void net_own_member(DistMember *me, int local_rank) {
    memset(me, 0, sizeof *me);
    if (gethostname(me->host, sizeof me->host - 1) != 0) snprintf(me->host, sizeof me->host, "unknown");
    me->local_rank = local_rank;
    me->present = 1;
}
// "1, 3 and 7 more" of the ranks that are not there.
FN void net_missing(const DistMember *members, int size, char *text, size_t room) {
    int told = 0, more = 0;
    size_t used = 0;
    text[0] = '\0';
    for (int r = 0; r < size; r++) {
        if (members[r].present) continue;
        if (told++ >= 16) { more++; continue; }
        used += (size_t)snprintf(text + used, room - used, "%s%d", used ? ", " : "", r);
    }
    if (more) snprintf(text + used, room - used, " and %d more", more);
}
// Rank 0: takes everybody's connection into control[] and sends the table. Missing ranks are named when time is up.
FN void net_gather_members(int listener, int size, DistMember *members, int *control, double seconds) {
    const double deadline = clock_seconds() + seconds;
    for (int present = 1; present < size;) {
        DistHello hello;
        struct sockaddr_in from;
        socklen_t length = sizeof from;
        if (!net_wait(listener, POLLIN, deadline)) {
            char text[256];
            net_missing(members, size, text, sizeof text);
            fatal("rendezvous: after %.0f s %d of %d processes are here, rank %s is missing; see whether it was started, with this "
                  "MASTER_ADDR, MASTER_PORT and WORLD_SIZE", seconds, present, size, text);
        }
        const int fd = accept(listener, (struct sockaddr *)&from, &length);
        if (fd < 0) continue;
        net_prepare(fd);
        const double soon = clock_seconds() + 5;
        if (net_receive(fd, &hello, sizeof hello, soon) != 0 || hello.magic != DIST_MAGIC) { close(fd); continue; }
        hello.member.host[sizeof hello.member.host - 1] = '\0';
        if (hello.size != size) fatal("rendezvous: rank %d on %.100s was started as one of %d processes, rank 0 as one of %d; give all the same WORLD_SIZE",
                                      hello.rank, hello.member.host, hello.size, size);
        if (hello.rank < 1 || hello.rank >= size || members[hello.rank].present)
            fatal("rendezvous: two processes say that they are rank %d (the second on %.100s); give each its own RANK from 0 to %d",
                  hello.rank, hello.member.host, size - 1);
        members[hello.rank] = hello.member;
        members[hello.rank].address = from.sin_addr;
        control[hello.rank] = fd;
        present++;
    }
    for (int r = 1; r < size; r++)
        if (net_send(control[r], members, (size_t)size * sizeof *members, clock_seconds() + seconds) != 0)
            fatal("rendezvous: rank %d on %s is gone before the run began", r, members[r].host);
}
// Another rank: its connection to rank 0, the table filled.
FN int net_join_members(struct in_addr master, const char *master_name, uint16_t port, int rank, int size, DistMember *members, double seconds) {
    const double deadline = clock_seconds() + seconds;
    const int fd = net_connect(master, port, deadline);
    if (fd < 0) fatal("rendezvous: rank 0 is missing: nothing answers at %s port %d for %.0f s (%s); see whether it was started there",
                      master_name, (int)port, seconds, strerror(errno));
    DistHello hello;
    memset(&hello, 0, sizeof hello);
    hello.magic = DIST_MAGIC; hello.rank = rank; hello.size = size; hello.member = members[rank];
    // Rank 0 tells at its own deadline, which may end a little later, who is missing.
    if (net_send(fd, &hello, sizeof hello, deadline) != 0 || net_receive(fd, members, (size_t)size * sizeof *members, deadline + seconds + 5) != 0)
        fatal("rendezvous: rank 0 at %s port %d ended it; its own message says why", master_name, (int)port);
    // Rank 0 knows those on its own host by a loopback address, which means another host to others.
    members[0].address = master;
    for (int r = 1; r < size; r++)
        if (ntohl(members[r].address.s_addr) >> 24 == 127) members[r].address = master;
    return fd;
}
// Connections of each pair: a rank calls those below it and is called by those above.
FN void net_mesh(int listener, int rank, int size, const DistMember *members, int *data, double seconds) {
    const double deadline = clock_seconds() + seconds;
    for (int r = 0; r < rank; r++) {
        DistHello hello;
        memset(&hello, 0, sizeof hello);
        hello.magic = DIST_MAGIC; hello.rank = rank; hello.size = size;
        data[r] = net_connect(members[r].address, members[r].port, deadline);
        if (data[r] < 0 || net_send(data[r], &hello, sizeof hello, deadline) != 0)
            fatal("cannot reach rank %d on %s, port %d: %s; see whether a firewall stands between the hosts", r, members[r].host,
                  (int)members[r].port, strerror(errno));
    }
    for (int left = size - 1 - rank; left > 0;) {
        DistHello hello;
        if (!net_wait(listener, POLLIN, deadline)) {
            int r = rank + 1;
            while (r < size - 1 && data[r] >= 0) r++;
            fatal("rank %d on %s does not connect; see whether a firewall stands between the hosts", r, members[r].host);
        }
        const int fd = accept(listener, NULL, NULL);
        if (fd < 0) continue;
        net_prepare(fd);
        if (net_receive(fd, &hello, sizeof hello, clock_seconds() + 5) != 0 || hello.magic != DIST_MAGIC || hello.size != size ||
            hello.rank <= rank || hello.rank >= size || data[hello.rank] >= 0) { close(fd); continue; }
        data[hello.rank] = fd;
        left--;
    }
}

#endif
