// Tests of dist.h over TCP: groups of processes of this machine, forked, each of which checks what it got; the parent, that all were
// satisfied. Values of every rank come from its number, so that each can compute what the sum must be.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <sys/wait.h>

#include "llmc/dist.h"

#define REQUIRE(x) do { if (!(x)) fatal("%s:%d: not so: %s", __FILE__, __LINE__, #x); } while (0)

typedef void RankTest(void);
static double timeout_s = 20;

// A port that nobody listens on now.
static int free_port(void) {
    uint16_t port = 0;
    close(net_listen(&port));
    return port;
}
static void rank_run(int rank, int size, int port, RankTest *test) {
    char text[32];
    const struct { const char *name; int value; } set[] = {{"RANK", rank}, {"WORLD_SIZE", size}, {"LOCAL_RANK", rank}, {"MASTER_PORT", port}};
    for (int i = 0; i < 4; i++) { snprintf(text, sizeof text, "%d", set[i].value); setenv(set[i].name, text, 1); }
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    unsetenv("OMPI_COMM_WORLD_SIZE");
    dist_init(timeout_s);
    test();
    dist_finish();
    _exit(0);
}
// -> how many of the processes ended well.
static int group_run(int size, RankTest *test) {
    const int port = free_port();
    int good = 0;
    pid_t child[16];
    fflush(NULL);
    for (int r = 0; r < size; r++)
        if ((child[r] = fork()) == 0) rank_run(r, size, port, test);
    for (int r = 0; r < size; r++) {
        int status;
        assert_int_equal(waitpid(child[r], &status, 0), child[r]);
        good += WIFEXITED(status) && WEXITSTATUS(status) == 0;
    }
    return good;
}

static float value(int rank, int64_t i) { return (float)(((i * 2654435761u + (uint32_t)rank * 40503u) & 0xFFFF) - 32768) / 977.0f; }
static float *values_of(int rank, int64_t count) {
    float *x = (float *)xcalloc((size_t)count, sizeof(float));
    for (int64_t i = 0; i < count; i++) x[i] = value(rank, i);
    return x;
}
// Rank by rank in float32, each rounded first, and the sum too, where it travels in BF16.
static float sum_at(int64_t i, DistType type) {
    float sum = 0;
    for (int r = 0; r < dist_size(); r++) sum += type == DIST_BF16 ? bf16_round(value(r, i)) : value(r, i);
    return type == DIST_BF16 ? bf16_round(sum) : sum;
}
// 128: fewer units than ranks. The largest: pieces of more than one chunk, of different length.
static const int64_t COUNTS[] = {128, 128 * 7, 128 * 1001, 3 * (int64_t)DIST_CHUNK + 128 * 5};

static void reduce_in_every_way(void) {
    for (size_t k = 0; k < sizeof COUNTS / sizeof COUNTS[0]; k++)
        for (int t = 0; t < 2; t++) {
            const DistType type = t ? DIST_BF16 : DIST_F32;
            const int64_t count = COUNTS[k];
            const DistPiece own = dist_piece(count, dist_rank(), dist_size());
            float *a = values_of(dist_rank(), count), *b = values_of(dist_rank(), count);
            dist_allreduce(a, count, type);
            dist_reduce_scatter(b, count, type);
            for (int64_t i = 0; i < count; i++) {
                REQUIRE(a[i] == sum_at(i, type));
                REQUIRE(b[i] == (i >= own.first && i < own.first + own.count ? a[i] : value(dist_rank(), i)));
            }
            dist_allgather(b, count, type);
            REQUIRE(memcmp(a, b, (size_t)count * sizeof(float)) == 0);
            free(a); free(b);
        }
}
static void small_things(void) {
    const int64_t count = 2 * (int64_t)DIST_CHUNK + 3;
    int all[16];
    const int mine = 100 + dist_rank();
    dist_gather(&mine, sizeof mine, all);
    for (int r = 0; r < dist_size(); r++) REQUIRE(all[r] == 100 + r);
    REQUIRE(dist_sum(0.1 * dist_rank()) == ({ double s = 0; for (int r = 0; r < dist_size(); r++) s += 0.1 * r; s; }));
    REQUIRE(dist_any(0) == 0);
    REQUIRE(dist_any(dist_rank() == dist_size() - 1 ? 7 : 0) == 7);
    for (int root = 0; root < dist_size(); root++) {
        float *x = values_of(dist_rank(), count);
        dist_broadcast(x, (size_t)count * sizeof(float), root);
        for (int64_t i = 0; i < count; i++) REQUIRE(x[i] == value(root, i));
        free(x);
    }
    for (int from = 0; from < dist_size(); from++) {
        float *x = values_of(dist_rank(), count), *to = (float *)xcalloc((size_t)count, sizeof(float));
        dist_to_first(to, x, count, from);
        for (int64_t i = 0; i < count && dist_rank() == 0; i++) REQUIRE(to[i] == value(from, i));
        free(x); free(to);
    }
    dist_barrier();
    dist_check_same("thing", "the same text", "no advice");
}
static void one_differs(void) {
    dist_check_same("thing", dist_rank() == 1 ? "a:1,b:3" : "a:1,b:2", "no advice");
    _exit(0);                                                          // it did not notice
}
static void one_fails(void) {
    if (dist_rank() == dist_size() - 1) fatal("this rank's own trouble");
    dist_barrier();
    _exit(0);                                                          // the others went on
}
static void one_dies(void) {
    if (dist_rank() == 0) _exit(0);                                    // without a word
    dist_barrier();
    _exit(0);
}

// Rank 0 keeps the others waiting for longer than the timeout: told so, they bear it.
static void first_works_alone(void) {
    if (dist_rank() == 0) { dist_alone(1); net_sleep(5); dist_alone(0); }
    dist_barrier();
}
static void first_is_late(void) {
    if (dist_rank() == 0) net_sleep(8);
    dist_barrier();
}
static void test_waiting(void **state) {
    (void)state;
    timeout_s = 3;
    assert_int_equal(group_run(3, first_works_alone), 3);
    assert_int_equal(group_run(3, first_is_late), 0);
    timeout_s = 20;
}

static void test_pieces(void **state) {
    (void)state;
    for (int64_t units = 0; units < 40; units++)
        for (int size = 1; size < 9; size++) {
            int64_t at = 0;
            for (int r = 0; r < size; r++) {
                const DistPiece p = dist_piece(units * DIST_UNIT, r, size);
                assert_int_equal(p.first, at);
                assert_int_equal(p.first % DIST_UNIT, 0);
                assert_int_equal(p.count, (units / size + (r == size - 1 ? units % size : 0)) * DIST_UNIT);
                at += p.count;
            }
            assert_int_equal(at, units * DIST_UNIT);
        }
}
static void test_reductions(void **state) {
    (void)state;
    for (int size = 2; size <= 5; size++) assert_int_equal(group_run(size, reduce_in_every_way), size);
}
static void test_small_exchanges(void **state) {
    (void)state;
    for (int size = 1; size <= 7; size++) assert_int_equal(group_run(size, small_things), size);
}
static void test_all_end_when_one_does(void **state) {
    (void)state;
    assert_int_equal(group_run(3, one_differs), 0);
    assert_int_equal(group_run(3, one_fails), 0);
    assert_int_equal(group_run(3, one_dies), 1);                       // itself
}

// A host that answers nothing: a listener whose queue is full drops what comes. Where connect() waited by itself, it would for minutes (the alarm).
static void test_connect_minds_the_deadline(void **state) {
    (void)state;
    uint16_t port = 0;
    const int listener = net_listen(&port);
    struct in_addr here;
    int held[8];
    here.s_addr = htonl(INADDR_LOOPBACK);
    assert_int_equal(listen(listener, 0), 0);
    alarm(60);
    int count = 0;
    while (count < 8 && (held[count] = net_connect(here, port, clock_seconds() + 1)) >= 0) count++;
    assert_true(count > 0 && count < 8);
    assert_int_equal(errno, ETIMEDOUT);
    assert_true(fcntl(held[0], F_GETFL) >= 0 && (fcntl(held[0], F_GETFL) & O_NONBLOCK) == 0);
    alarm(0);
    while (count > 0) close(held[--count]);
    close(listener);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_connect_minds_the_deadline), cmocka_unit_test(test_pieces), cmocka_unit_test(test_reductions), cmocka_unit_test(test_small_exchanges),
        cmocka_unit_test(test_all_end_when_one_does), cmocka_unit_test(test_waiting),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
