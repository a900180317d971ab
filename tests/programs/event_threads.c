/* Threads of one process that block in ibv_get_cq_event, each for the messages of another, and a thread that posts without
 * polling and waits with poll(2). */
#include <infiniband/verbs.h>
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { THREADS = 4, ROUNDS = 500, BYTES = 64 };
#define CHECK(what) \
    do { if (!(what)) { fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #what); exit(1); } } while (0)

struct end {
    struct ibv_comp_channel *channel;
    struct ibv_cq *receives, *sends;
    struct ibv_qp *qp;
    struct ibv_mr *mr;
    char bytes[2 * BYTES];
    int begins;
};

static struct ibv_context *context;
static struct ibv_pd *pd;
static union ibv_gid gid;
static struct end ends[THREADS];

static void post_receive(struct end *end) {
    struct ibv_sge sge = { (uintptr_t)end->bytes, BYTES, end->mr->lkey };
    struct ibv_recv_wr wr = { .sg_list = &sge, .num_sge = 1 }, *bad;
    CHECK(!ibv_post_recv(end->qp, &wr, &bad));
}

static void post_send(struct end *end) {
    struct ibv_sge sge = { (uintptr_t)end->bytes + BYTES, BYTES, end->mr->lkey };
    struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED }, *bad;
    CHECK(!ibv_post_send(end->qp, &wr, &bad));
}

static void create(struct end *end) {
    CHECK(end->channel = ibv_create_comp_channel(context));
    CHECK(end->receives = ibv_create_cq(context, 16, NULL, end->channel, 0));
    CHECK(end->sends = ibv_create_cq(context, 2 * ROUNDS, NULL, NULL, 0));
    CHECK(end->mr = ibv_reg_mr(pd, end->bytes, sizeof end->bytes, IBV_ACCESS_LOCAL_WRITE));
    struct ibv_qp_init_attr init = { .send_cq = end->sends, .recv_cq = end->receives, .qp_type = IBV_QPT_RC,
        .cap = { .max_send_wr = 2 * ROUNDS, .max_recv_wr = 16, .max_send_sge = 1, .max_recv_sge = 1 } };
    CHECK(end->qp = ibv_create_qp(pd, &init));
    struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
    CHECK(!ibv_modify_qp(end->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
    for (int i = 0; i < 4; i++) post_receive(end);
    CHECK(!ibv_req_notify_cq(end->receives, 0));
}

static void connect_to(struct end *end, struct end *peer) {
    struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = peer->qp->qp_num,
        .max_dest_rd_atomic = 1, .min_rnr_timer = 12,
        .ah_attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = gid, .hop_limit = 255 } } };
    CHECK(!ibv_modify_qp(end->qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
        IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
    struct ibv_qp_attr send = { .qp_state = IBV_QPS_RTS, .timeout = 20, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 1 };
    CHECK(!ibv_modify_qp(end->qp, &send, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
        IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC));
}

/* The number of messages that have arrived, after an event. */
static int take(struct end *end) {
    struct ibv_cq *cq;
    void *cq_context;
    CHECK(!ibv_get_cq_event(end->channel, &cq, &cq_context) && cq == end->receives);
    ibv_ack_cq_events(cq, 1);
    CHECK(!ibv_req_notify_cq(cq, 0));
    struct ibv_wc wc;
    int got, count = 0;
    while ((got = ibv_poll_cq(cq, 1, &wc)) > 0) {
        CHECK(wc.status == IBV_WC_SUCCESS);
        post_receive(end);
        count++;
    }
    CHECK(got == 0);
    return count;
}

static void *ping_pong(void *argument) {
    struct end *end = argument;
    int received = 0;
    if (end->begins) post_send(end);
    while (received < ROUNDS) {
        int count = take(end);
        for (int i = 0; i < count; i++)
            if (++received < ROUNDS || !end->begins) post_send(end);
    }
    return NULL;
}

int main(void) {
    struct ibv_device **devices = ibv_get_device_list(NULL);
    CHECK(devices && devices[0] && (context = ibv_open_device(devices[0])) && (pd = ibv_alloc_pd(context)));
    CHECK(!ibv_query_gid(context, 1, 0, &gid));
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++) create(&ends[i]);
    for (int i = 0; i < THREADS; i++) connect_to(&ends[i], &ends[i ^ 1]);
    for (int i = 0; i < THREADS; i++) {
        ends[i].begins = i % 2;
        CHECK(!pthread_create(&threads[i], NULL, ping_pong, &ends[i]));
    }
    for (int i = 0; i < THREADS; i++) CHECK(!pthread_join(threads[i], NULL));
    for (int i = 0; i < 200; i++) {
        struct end *from = &ends[i % THREADS], *to = &ends[i % THREADS ^ 1];
        post_send(from);
        struct pollfd polled = { to->channel->fd, POLLIN, 0 };
        CHECK(poll(&polled, 1, 30000) == 1);
        while (take(to) == 0) {}
    }
    puts("done");
}
