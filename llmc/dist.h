// dist.h: the group of processes that train one model: who they are, and sums, gathers and broadcasts of host memory among them.
//
// Started by mpirun or srun, ranks come from MPI (builds with USE_MPI) and MPI carries the data; else from RANK, WORLD_SIZE,
// LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as torchrun-style launchers set them, and plain TCP carries it. Neither: one process, and
// every function here is free. On the GPU NCCL moves what is large (cuda/dist_nccl.cuh); what is small goes through here.
//
// A sum has one order: rank 0's value, plus rank 1's, and so on, in float32, whatever arrives first and whoever owns the element.
// So a reduce-scatter followed by an all-gather is the all-reduce, bit for bit. One thread at a time may call the exchanges (main's
// alone where dist_main_only()), and every rank must call the same ones in the same order.
#ifndef LLMC_DIST_H
#define LLMC_DIST_H

#ifdef USE_MPI
#include <mpi.h>
#endif

#include <sys/resource.h>

#include "dist_watch.h"
#include "formats.h"

enum { DIST_RENDEZVOUS_S = 60, DIST_UNIT = 128, DIST_CHUNK = 1 << 18 };  // DIST_CHUNK: elements on their way to one rank at a time
typedef enum { DIST_F32, DIST_BF16 } DistType;

typedef struct {
    int rank, size, local_rank;
    int by_mpi;
    int main_only;                   // this MPI takes calls from the thread that began it alone
    DistMember *members;             // (size)
    int *data;                       // (size) TCP connections, -1 where there is none
    char *staging;                   // (size + 1) chunks of float32
} Dist;
static Dist dist = {0, 1, 0, 0, 0, NULL, NULL, NULL};               // one process until dist_init finds more

FN int dist_rank(void) { return dist.rank; }
FN int dist_size(void) { return dist.size; }
FN int dist_main_only(void) { return dist.main_only; }
FN int dist_local_rank(void) { return dist.local_rank; }
FN const char *dist_host(int rank) { return dist.members ? dist.members[rank].host : "this host"; }
// Ends the run on every rank within seconds; the error names this rank and host.
#define dist_abort(...) fatal(__VA_ARGS__)

// ---------------------------------------------------------------------------------------------------------------------
// Who we are

FN int env_integer(const char *name, int low, int high, int otherwise) {
    const char *text = getenv(name);
    char *end;
    if (!text || !*text) {
        if (otherwise < low) fatal_usage("%s is not set, though WORLD_SIZE is; a launcher sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT", name);
        return otherwise;
    }
    const long value = strtol(text, &end, 10);
    if (*end || value < low || value > high) fatal_usage("%s=%s: a whole number from %d to %d is expected", name, text, low, high);
    return (int)value;
}
// Whether an MPI launcher started this process as one of several. srun sets PMI's variables whatever it starts: there those that a
// script sets by hand say more.
FN int dist_under_mpi(void) {
    const char *size = getenv("OMPI_COMM_WORLD_SIZE");
    return size ? atoi(size) > 1 : !getenv("WORLD_SIZE") && (getenv("PMIX_RANK") || getenv("PMI_RANK"));
}
FN void dist_set(int rank, int size) {
    if (size > 4096) fatal("%d processes: random addresses have room for 4096 ranks", size);
    struct rlimit files;                                               // a connection of each pair, and what the run itself opens
    if (getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur < files.rlim_max) {
        files.rlim_cur = files.rlim_max;
        (void)setrlimit(RLIMIT_NOFILE, &files);                        // where it is refused, the socket that is one too many says so
    }
    dist.rank = rank; dist.size = size;
    dist.members = (DistMember *)xcalloc((size_t)size, sizeof(DistMember));
    dist.data = (int *)xcalloc((size_t)size, sizeof(int));
    dist_watch.rank = rank; dist_watch.size = size; dist_watch.members = dist.members;
    dist_watch.control = (int *)xcalloc((size_t)size, sizeof(int));
    for (int r = 0; r < size; r++) dist.data[r] = dist_watch.control[r] = -1;
}
// The star of control connections, and (mesh) one of each pair for data. port: rank 0's, 0: it chooses, `announce` tells the others.
FN void dist_connect(const char *master, uint16_t port, int mesh, double seconds, void (*announce)(uint16_t *port)) {
    uint16_t own = dist.rank == 0 ? port : 0;
    const int listener = net_listen(&own);
    net_own_member(&dist.members[dist.rank], dist.local_rank);
    dist.members[dist.rank].port = own;
    if (announce) { port = own; announce(&port); }
    if (dist.rank == 0) net_gather_members(listener, dist.size, dist.members, dist_watch.control, seconds);
    else dist_watch.control[0] = net_join_members(net_resolve(master), master, port, dist.rank, dist.size, dist.members, seconds);
    if (mesh) net_mesh(listener, dist.rank, dist.size, dist.members, dist.data, seconds);
    close(listener);
}
#ifdef USE_MPI
FN void mpi_announce(uint16_t *port) { MPI_Bcast(port, (int)sizeof *port, MPI_BYTE, 0, MPI_COMM_WORLD); }
FN void dist_init_mpi(double seconds) {
    char master[DIST_HOST_TEXT] = "";
    int rank, size, provided, leader;
    MPI_Comm node;
    if (MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &provided) != MPI_SUCCESS) fatal("MPI does not start; try mpirun -np 2 hostname");
    dist.main_only = provided < MPI_THREAD_SERIALIZED;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &node);
    MPI_Comm_rank(node, &dist.local_rank);
    leader = rank;
    MPI_Bcast(&leader, 1, MPI_INT, 0, node);
    MPI_Comm_free(&node);
    dist.by_mpi = 1;
    if (size == 1) return;
    dist_set(rank, size);
    // Rank 0's host by its own name, or as MASTER_ADDR says where that does not resolve.
    if (getenv("MASTER_ADDR")) snprintf(master, sizeof master, "%s", getenv("MASTER_ADDR"));
    else if (gethostname(master, sizeof master - 1) != 0) snprintf(master, sizeof master, "localhost");
    MPI_Bcast(master, (int)sizeof master, MPI_BYTE, 0, MPI_COMM_WORLD);
    if (leader == 0) snprintf(master, sizeof master, "127.0.0.1");     // the same host
    dist_connect(master, 0, 0, seconds, mpi_announce);
}
#endif
FN void dist_init_env(double seconds) {
    const int size = env_integer("WORLD_SIZE", 1, 1 << 20, 0), rank = env_integer("RANK", 0, size - 1, -1);
    dist.local_rank = env_integer("LOCAL_RANK", 0, size - 1, rank);
    if (size == 1) return;
    const char *master = getenv("MASTER_ADDR");
    if (!master || !*master) fatal_usage("MASTER_ADDR is not set, though WORLD_SIZE is %d; name the host of rank 0", size);
    const int port = env_integer("MASTER_PORT", 1, 65535, 29500);
    dist_set(rank, size);
    dist_connect(master, (uint16_t)port, 1, seconds, NULL);
}
// Finds the group and connects to it. timeout: seconds that an exchange may wait for a rank that does not come. A rank that is
// missing from the start is named after the smaller of that and a minute.
FN void dist_init(double timeout) {
    const double seconds = timeout < DIST_RENDEZVOUS_S ? timeout : DIST_RENDEZVOUS_S;
    dist_watch.timeout = timeout;
    if (dist_under_mpi()) {
#ifdef USE_MPI
        dist_init_mpi(seconds);
#else
        fatal("started by an MPI launcher, but this program was built without MPI; install it (Debian: libopenmpi-dev), 'make probe' and "
              "'make' again, or start it with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set");
#endif
    } else if (getenv("WORLD_SIZE")) dist_init_env(seconds);
    if (dist.size == 1) return;
    snprintf(message_origin, sizeof message_origin, "rank %d on %s: ", dist.rank, dist_host(dist.rank));
    if (dist.rank != 0) {                                              // rank 0 speaks for all, but for errors
        message_warnings_off = 1;
        if (!freopen("/dev/null", "w", stdout)) fatal("/dev/null: cannot open: %s", strerror(errno));
    }
    watch_start();
}

// ---------------------------------------------------------------------------------------------------------------------
// One exchange of two messages

// The connection to a rank broke. The watching threads see the same and know more of it: they have a moment to end this process.
FN void dist_lost(int rank) __attribute__((noreturn));
FN void dist_lost(int rank) {
    net_sleep(2);
    fatal("lost the connection to rank %d on %s; the last checkpoint stands, go on with --resume auto", rank, dist_host(rank));
}
// Sends to one rank while receiving from another (which may be the same): neither waits for the other. The watching thread minds the time.
FN void tcp_exchange(int to, const char *out, size_t out_bytes, int from, char *in, size_t in_bytes) {
    while (out_bytes || in_bytes) {
        struct pollfd p[2] = {{out_bytes ? dist.data[to] : -1, POLLOUT, 0}, {in_bytes ? dist.data[from] : -1, POLLIN, 0}};
        if (poll(p, 2, 1000) < 0 && errno != EINTR) fatal("cannot wait for messages: %s", strerror(errno));
        if (p[0].revents) {
            const ssize_t n = send(dist.data[to], out, out_bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
            if (n < 0 && errno != EINTR && errno != EAGAIN) dist_lost(to);
            if (n > 0) { out += n; out_bytes -= (size_t)n; }
        }
        if (p[1].revents) {
            const ssize_t n = recv(dist.data[from], in, in_bytes, MSG_DONTWAIT);
            if (n == 0 || (n < 0 && errno != EINTR && errno != EAGAIN)) dist_lost(from);
            if (n > 0) { in += n; in_bytes -= (size_t)n; }
        }
    }
}
#ifdef USE_MPI
// Polls with pauses that grow: ranks that share cores must not spin while another computes.
FN void mpi_exchange(int to, const char *out, size_t out_bytes, int from, char *in, size_t in_bytes) {
    MPI_Request requests[2] = {MPI_REQUEST_NULL, MPI_REQUEST_NULL};
    int done = 0;
    if (in_bytes) MPI_Irecv(in, (int)in_bytes, MPI_BYTE, from, 0, MPI_COMM_WORLD, &requests[0]);
    if (out_bytes) MPI_Isend(out, (int)out_bytes, MPI_BYTE, to, 0, MPI_COMM_WORLD, &requests[1]);
    for (int tries = 0; MPI_Testall(2, requests, &done, MPI_STATUSES_IGNORE) == MPI_SUCCESS && !done; tries++)
        if (tries > 100) net_sleep(tries < 1000 ? 2e-5 : 2e-4);
}
#endif
// At most 1 GiB each way.
FN void dist_exchange(int to, const void *out, size_t out_bytes, int from, void *in, size_t in_bytes) {
#ifdef USE_MPI
    if (dist.by_mpi) { mpi_exchange(to, (const char *)out, out_bytes, from, (char *)in, in_bytes); return; }
#endif
    tcp_exchange(to, (const char *)out, out_bytes, from, (char *)in, in_bytes);
}

// ---------------------------------------------------------------------------------------------------------------------
// Bytes

// all (size, bytes): everybody's `mine`. In log2(size) rounds (Bruck et al., IEEE TPDS 8(11), 1997): it is a part of every step.
FN void dist_gather(const void *mine, size_t bytes, void *all) {
    const int size = dist.size, me = dist.rank;
    if (size == 1) { memcpy(all, mine, bytes); return; }
    char *const turned = (char *)xcalloc((size_t)size, bytes);         // block i: of rank (me + i) % size
    memcpy(turned, mine, bytes);
    watch_enter();
    for (int have = 1; have < size; have *= 2) {
        const size_t n = (size_t)(have < size - have ? have : size - have) * bytes;
        dist_exchange((me - have + size) % size, turned, n, (me + have) % size, turned + (size_t)have * bytes, n);
    }
    watch_leave();
    for (int i = 0; i < size; i++) memcpy((char *)all + (size_t)((me + i) % size) * bytes, turned + (size_t)i * bytes, bytes);
    free(turned);
}
// Root's bytes to everybody, along a binomial tree.
FN void dist_broadcast(void *p, size_t bytes, int root) {
    const int size = dist.size, me = (dist.rank - root + size) % size;
    const size_t most = (size_t)1 << 26;
    if (size == 1) return;
    watch_enter();
    for (char *at = (char *)p; bytes > 0;) {
        const size_t n = bytes < most ? bytes : most;
        int step = 1;
        while (step < size && me >= 2 * step) step *= 2;               // me received in the round of its highest bit
        if (me > 0) dist_exchange(root, NULL, 0, (me - step + root) % size, at, n);
        for (int s = me ? 2 * step : 1; s < size; s *= 2)
            if (me + s < size) dist_exchange((me + s + root) % size, at, n, root, NULL, 0);
        at += n; bytes -= n;
    }
    watch_leave();
}
// Nobody returns before all have come.
FN void dist_barrier(void) {
    char mine = 0, *all = (char *)xcalloc((size_t)dist.size, 1);
    dist_gather(&mine, 1, all);
    free(all);
}
// The sum over ranks, rank by rank: the same bits everywhere.
FN double dist_sum(double x) {
    double *all = (double *)xcalloc((size_t)dist.size, sizeof(double)), sum = 0;
    dist_gather(&x, sizeof x, all);
    for (int r = 0; r < dist.size; r++) sum += all[r];
    free(all);
    return sum;
}
// on: rank 0 now does what only it does and what takes its time (reading or finishing a checkpoint); the others' wait for it is not held
// against it until it says that it is done.
FN void dist_alone(int on) { __atomic_store_n(&dist_watch.alone, on, __ATOMIC_RELEASE); }
// The value of the first rank whose value is not 0; 0 if there is none.
FN int dist_any(int value) {
    int *all = (int *)xcalloc((size_t)dist.size, sizeof(int)), found = 0;
    dist_gather(&value, sizeof value, all);
    for (int r = dist.size - 1; r >= 0; r--) if (all[r]) found = all[r];
    free(all);
    return found;
}
// Every rank has found the same error: rank 0 tells it, the others wait to be ended by that.
PRINTF_LIKE(1, 2) __attribute__((noreturn))
static void dist_fatal_together(const char *format, ...) {
    va_list args;
    va_start(args, format);
    if (dist.rank != 0) {
        // Rank 0 may have a checkpoint to finish first.
        for (const double until = clock_seconds() + dist_watch.timeout + 60; clock_seconds() < until;) net_sleep(0.1);
        exit(1);
    }
    die_v(1, "error", format, args);
    va_end(args);
    abort();
}
// What must be the same on every rank: each compares its text with rank 0's. The run ends otherwise, naming rank, host, and the first
// difference.
FN void dist_check_same(const char *what, const char *text, const char *advice) {
    enum { SHOWN = 160 };
    typedef struct { int differs; char there[SHOWN], here[SHOWN]; } Verdict;
    uint64_t length = strlen(text);
    Verdict mine, *all = (Verdict *)xcalloc((size_t)dist.size, sizeof(Verdict));
    memset(&mine, 0, sizeof mine);
    dist_broadcast(&length, sizeof length, 0);
    char *first = (char *)xcalloc((size_t)length + 1, 1);
    if (dist.rank == 0) memcpy(first, text, (size_t)length);
    dist_broadcast(first, (size_t)length, 0);
    size_t same = 0, from = 0;
    while (first[same] && first[same] == text[same]) {
        if (first[same] == ',' || first[same] == '{') from = same + 1; // show the whole field
        same++;
    }
    mine.differs = first[same] != text[same];
    if (mine.differs) {
        snprintf(mine.there, SHOWN, "%.*s", (int)strcspn(text + from, ",}\n"), text + from);
        snprintf(mine.here, SHOWN, "%.*s", (int)strcspn(first + from, ",}\n"), first + from);
    }
    dist_gather(&mine, sizeof mine, all);
    for (int r = 0; r < dist.size; r++)
        if (all[r].differs)
            dist_fatal_together("rank %d on %s has another %s than rank 0 on %s: %s there, %s here; %s", r, dist_host(r), what, dist_host(0),
                                all[r].there, all[r].here, advice);
    free(first);
    free(all);
}

// ---------------------------------------------------------------------------------------------------------------------
// Values

// The part of `count` elements (a multiple of 128) that a rank owns: equal numbers of whole runs of 128, as NCCL's collectives want
// them; what is left over, fewer runs than there are ranks, is the last rank's.
typedef struct { int64_t first, count; } DistPiece;
FN DistPiece dist_piece(int64_t count, int rank, int size) {
    const int64_t each = count / DIST_UNIT / size * DIST_UNIT;
    const DistPiece p = {rank * each, rank == size - 1 ? count - rank * each : each};
    return p;
}
// Elements of piece p from the k-th chunk on, at most one chunk.
FN DistPiece piece_chunk(DistPiece p, int64_t k) {
    const int64_t left = p.count - k * DIST_CHUNK;
    const DistPiece c = {p.first + k * DIST_CHUNK, left < 0 ? 0 : left < DIST_CHUNK ? left : DIST_CHUNK};
    return c;
}
FN int64_t dist_chunks(int64_t count) { return (dist_piece(count, dist.size - 1, dist.size).count + DIST_CHUNK - 1) / DIST_CHUNK; }
FN size_t dist_bytes(int64_t count, DistType type) { return (size_t)count * (type == DIST_BF16 ? 2 : 4); }
FN void dist_pack(void *to, const float *x, int64_t count, DistType type) {
    if (type == DIST_F32) { memcpy(to, x, (size_t)count * 4); return; }
    for (int64_t i = 0; i < count; i++) ((uint16_t *)to)[i] = bf16_encode(x[i]);
}
FN void dist_unpack(float *x, const void *from, int64_t count, DistType type) {
    if (type == DIST_F32) { memcpy(x, from, (size_t)count * 4); return; }
    for (int64_t i = 0; i < count; i++) x[i] = bf16_decode(((const uint16_t *)from)[i]);
}
// Where a chunk of a rank lies on its way; `size`: one more, for what is sent. GPUs that have NCCL never need the memory.
FN char *dist_slot(int rank) {
    if (!dist.staging) dist.staging = (char *)xcalloc((size_t)(dist.size + 1) * DIST_CHUNK, sizeof(float));
    return dist.staging + (size_t)rank * DIST_CHUNK * sizeof(float);
}

// x (count, a multiple of 128): this rank's piece becomes the sum over ranks; the rest is as it was. DIST_BF16: every rank's values
// are rounded to BF16 on their way, added in float32, and the sum is rounded.
FN void dist_reduce_scatter(float *x, int64_t count, DistType type) {
    const int size = dist.size, me = dist.rank;
    const DistPiece own = dist_piece(count, me, size);
    if (size == 1) return;
    watch_enter();
    for (int64_t k = 0; k < dist_chunks(count); k++) {
        const DistPiece c = piece_chunk(own, k);
        for (int s = 1; s < size; s++) {
            const int to = (me + s) % size, from = (me - s + size) % size;
            const DistPiece theirs = piece_chunk(dist_piece(count, to, size), k);
            dist_pack(dist_slot(size), x + theirs.first, theirs.count, type);
            dist_exchange(to, dist_slot(size), dist_bytes(theirs.count, type), from, dist_slot(from), dist_bytes(c.count, type));
        }
        dist_pack(dist_slot(me), x + c.first, c.count, type);
        for (int64_t i = 0; i < c.count; i++) {
            float sum = 0;
            for (int r = 0; r < size; r++)
                sum += type == DIST_BF16 ? bf16_decode(((const uint16_t *)dist_slot(r))[i]) : ((const float *)dist_slot(r))[i];
            x[c.first + i] = type == DIST_BF16 ? bf16_round(sum) : sum;
        }
    }
    watch_leave();
}
// x (count): every rank's piece, to everybody. DIST_BF16 is exact only for values that BF16 holds.
FN void dist_allgather(float *x, int64_t count, DistType type) {
    const int size = dist.size, me = dist.rank;
    const DistPiece own = dist_piece(count, me, size);
    if (size == 1) return;
    watch_enter();
    for (int64_t k = 0; k < dist_chunks(count); k++) {
        const DistPiece mine = piece_chunk(own, k);
        dist_pack(dist_slot(size), x + mine.first, mine.count, type);
        for (int s = 1; s < size; s++) {
            const int to = (me + s) % size, from = (me - s + size) % size;
            const DistPiece theirs = piece_chunk(dist_piece(count, from, size), k);
            dist_exchange(to, dist_slot(size), dist_bytes(mine.count, type), from, dist_slot(from), dist_bytes(theirs.count, type));
            dist_unpack(x + theirs.first, dist_slot(from), theirs.count, type);
        }
    }
    watch_leave();
}
FN void dist_allreduce(float *x, int64_t count, DistType type) {
    dist_reduce_scatter(x, count, type);
    dist_allgather(x, count, type);
}
// count float32 values of rank `from` into rank 0's `to` (from = 0: copied). Every rank calls it; only these two read what they pass.
FN void dist_to_first(float *to, const float *values, int64_t count, int from) {
    if (from == 0) { if (dist.rank == 0) memcpy(to, values, (size_t)count * 4); return; }
    watch_enter();                                                     // on every rank: the numbers of exchanges must agree
    for (int64_t at = 0; at < count && (dist.rank == 0 || dist.rank == from); at += DIST_CHUNK) {
        const size_t bytes = dist_bytes(count - at < DIST_CHUNK ? count - at : DIST_CHUNK, DIST_F32);
        if (dist.rank == 0) dist_exchange(from, NULL, 0, from, to + at, bytes);
        else dist_exchange(0, values + at, bytes, 0, NULL, 0);
    }
    watch_leave();
}

// The run is over, in order, on every rank. Without this call a process that ends takes the others with it.
FN void dist_finish(void) {
    if (dist.size > 1) {
        dist_barrier();
        watch_stop();
        dist_barrier();
        watch_close();
        for (int r = 0; r < dist.size; r++) if (dist.data[r] >= 0) close(dist.data[r]);
        free(dist.staging); free(dist.data); free(dist_watch.control); free(dist.members);
    }
#ifdef USE_MPI
    if (dist.by_mpi) MPI_Finalize();
#endif
    memset(&dist, 0, sizeof dist);
    dist.size = 1;
}

#endif
