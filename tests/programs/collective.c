/* The calls that NCCL's IB transport makes for one connection: several RC queue pairs, a FIFO in which the receiver
 * announces buffers by inline WRITEs, data by WRITEs that end in a WRITE with immediate data on each queue pair, and a
 * flush by a READ over a queue pair that is connected to itself.
 *
 *   collective heap|secret      "secret": memory that no other process and no system call can access, as memory that a
 *                               GPU driver maps (memfd_secret)
 */
#define _GNU_SOURCE
#include <infiniband/verbs.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { QPS = 2, SLOTS = 8, BYTES = 1 << 20, ROUNDS = 32 };
#define CHECK(what) \
    do { if (!(what)) { fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #what); exit(1); } } while (0)

struct slot { uint64_t address; uint32_t rkey, length, tag; uint64_t index; };
struct end { uint32_t qpn[QPS]; union ibv_gid gid; uint64_t fifo; uint32_t rkey; };

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_qp *qps[QPS], *flush;
static union ibv_gid gid;

static void *memory(const char *kind, size_t length) {
    if (strcmp(kind, "secret")) {
        void *place = aligned_alloc(4096, length);
        CHECK(place);
        return place;
    }
    int file = syscall(SYS_memfd_secret, 0);
    if (file < 0) { puts("skipped: no memfd_secret"); exit(77); }
    CHECK(!ftruncate(file, length));
    void *place = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    CHECK(place != MAP_FAILED);
    memset(place, 0, length);
    return place;
}

static struct ibv_qp *create_qp(void) {
    struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
        .cap = { .max_send_wr = 2 * SLOTS * 4, .max_recv_wr = SLOTS * 4, .max_send_sge = 1, .max_recv_sge = 1,
                 .max_inline_data = sizeof(struct slot) } };
    struct ibv_qp *qp = ibv_create_qp(pd, &init);
    CHECK(qp);
    struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1,
        .qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ };
    CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
    return qp;
}

static void connect_qp(struct ibv_qp *qp, uint32_t peer, union ibv_gid at) {
    struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = peer,
        .max_dest_rd_atomic = 1, .min_rnr_timer = 12,
        .ah_attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = at, .hop_limit = 255 } } };
    CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
        IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
    struct ibv_qp_attr send = { .qp_state = IBV_QPS_RTS, .timeout = 20, .retry_cnt = 7, .rnr_retry = 7,
        .max_rd_atomic = 1 };
    CHECK(!ibv_modify_qp(qp, &send, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
        IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC));
}

/* Polls until `count` completions have arrived. */
static void await(int count, enum ibv_wc_opcode opcode, uint32_t immediate) {
    struct ibv_wc wc[4];
    while (count > 0) {
        int got = ibv_poll_cq(cq, 4, wc);
        CHECK(got >= 0);
        for (int i = 0; i < got; i++) {
            if (wc[i].status) { fprintf(stderr, "%s, vendor_err %u\n", ibv_wc_status_str(wc[i].status), wc[i].vendor_err); exit(1); }
            if (wc[i].opcode != opcode) continue;
            if (opcode == IBV_WC_RECV_RDMA_WITH_IMM) CHECK(wc[i].imm_data == htobe32(immediate));
            count--;
        }
    }
}

static void run(int is_sender, int channel, const char *kind) {
    struct ibv_device **devices = ibv_get_device_list(NULL);
    CHECK(devices && devices[0] && (context = ibv_open_device(devices[0])));
    CHECK((pd = ibv_alloc_pd(context)) && (cq = ibv_create_cq(context, 1024, NULL, NULL, 0)));
    CHECK(!ibv_query_gid(context, 1, 0, &gid));
    char *data = memory(kind, BYTES);
    struct slot *fifo = memory(kind, 4096);
    struct ibv_mr *region = ibv_reg_mr(pd, data, BYTES,
        IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_RELAXED_ORDERING);
    struct ibv_mr *slots = ibv_reg_mr(pd, fifo, 4096,
        IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ);
    CHECK(region && slots);
    struct end own = { .gid = gid, .fifo = (uintptr_t)fifo, .rkey = slots->rkey }, peer;
    for (int i = 0; i < QPS; i++) own.qpn[i] = (qps[i] = create_qp())->qp_num;
    CHECK(write(channel, &own, sizeof own) == sizeof own && read(channel, &peer, sizeof peer) == sizeof peer);
    for (int i = 0; i < QPS; i++) connect_qp(qps[i], peer.qpn[i], peer.gid);
    char ready = 1;
    CHECK(write(channel, &ready, 1) == 1 && read(channel, &ready, 1) == 1);

    if (is_sender) {
        for (uint64_t round = 1; round <= ROUNDS; round++) {
            volatile struct slot *slot = &fifo[round % SLOTS];
            while (slot->index != round) __sync_synchronize();
            memset(data, (int)round, BYTES);
            for (int i = 0; i < QPS; i++) {
                /* Each queue pair carries a part, without a completion, and the notification after it. */
                uint32_t part = BYTES / QPS;
                struct ibv_sge sge = { (uintptr_t)data + i * part, part, region->lkey };
                struct ibv_send_wr last = { .wr_id = round, .opcode = IBV_WR_RDMA_WRITE_WITH_IMM,
                    .send_flags = IBV_SEND_SIGNALED, .imm_data = htobe32(BYTES) }, *bad;
                struct ibv_send_wr first = { .wr_id = round, .opcode = IBV_WR_RDMA_WRITE, .sg_list = &sge, .num_sge = 1,
                    .wr.rdma = { slot->address + i * part, slot->rkey }, .next = &last };
                CHECK(!ibv_post_send(qps[i], &first, &bad));
            }
            await(QPS, IBV_WC_RDMA_WRITE, 0);
        }
    } else {
        flush = create_qp();
        connect_qp(flush, flush->qp_num, gid);
        int *landing = memory("heap", 4096);
        struct ibv_mr *landed = ibv_reg_mr(pd, landing, 4096, IBV_ACCESS_LOCAL_WRITE);
        CHECK(landed);
        for (uint64_t round = 1; round <= ROUNDS; round++) {
            for (int i = 0; i < QPS; i++) {
                struct ibv_recv_wr receive = { .wr_id = round }, *bad;
                CHECK(!ibv_post_recv(qps[i], &receive, &bad));
            }
            struct slot slot = { (uintptr_t)data, region->rkey, BYTES, 7, round };
            struct ibv_sge sge = { (uintptr_t)&slot, sizeof slot, 0 };
            struct ibv_send_wr wr = { .wr_id = round, .opcode = IBV_WR_RDMA_WRITE, .sg_list = &sge, .num_sge = 1,
                .send_flags = IBV_SEND_INLINE | (round % SLOTS ? 0 : IBV_SEND_SIGNALED),
                .wr.rdma = { peer.fifo + round % SLOTS * sizeof slot, peer.rkey } }, *bad;
            CHECK(!ibv_post_send(qps[0], &wr, &bad));
            await(QPS, IBV_WC_RECV_RDMA_WITH_IMM, BYTES);
            struct ibv_sge one = { (uintptr_t)landing, 1, landed->lkey };
            struct ibv_send_wr read = { .wr_id = round, .opcode = IBV_WR_RDMA_READ, .sg_list = &one, .num_sge = 1,
                .send_flags = IBV_SEND_SIGNALED, .wr.rdma = { (uintptr_t)data, region->rkey } };
            CHECK(!ibv_post_send(flush, &read, &bad));
            await(1, IBV_WC_RDMA_READ, 0);
            CHECK((char)landing[0] == (char)round);
            for (int i = 0; i < BYTES; i++) CHECK(data[i] == (char)round);
        }
        puts("all rounds were right");
    }
    CHECK(write(channel, &ready, 1) == 1 && read(channel, &ready, 1) == 1);
}

int main(int argc, char **argv) {
    int channel[2], status;
    CHECK(argc == 2 && !socketpair(AF_UNIX, SOCK_STREAM, 0, channel));
    pid_t child = fork();
    CHECK(child >= 0);
    /* An end whose peer has failed would poll for ever. */
    alarm(60);
    close(channel[child == 0]);
    run(child == 0, channel[child != 0], argv[1]);
    fflush(stdout);
    if (child == 0) _exit(0);
    CHECK(waitpid(child, &status, 0) == child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}
