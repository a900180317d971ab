/* Opens the device and connects a queue pair, as in the first exercise. */
#pragma once
#include "exchange.h"
#include <infiniband/verbs.h>
#include <stdint.h>

/* What a program tells its peer. */
struct endpoint {
    uint32_t qpn, psn;
    union ibv_gid gid;
    uint64_t address;
    uint32_t rkey;
};

struct rdma {
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    int connection;       /* the TCP connection */
    struct endpoint peer; /* after rdma_connect */
};

/* How a queue pair is connected. Zero is the usual value. */
struct rdma_options {
    uint8_t timeout, retry_cnt, rnr_retry;
};

static inline void rdma_open(struct rdma *r)
{
    struct ibv_device **list = ibv_get_device_list(NULL);
    if (!list || !list[0])
        die("no device");
    r->context = ibv_open_device(list[0]);
    ibv_free_device_list(list);
    r->pd = r->context ? ibv_alloc_pd(r->context) : NULL;
    if (!r->pd)
        die("open the device");
}

/* Creates a completion queue, and a queue pair of this type in the state INIT. */
static inline void rdma_create(struct rdma *r, enum ibv_qp_type type, int cqe, struct ibv_qp_cap cap, int all_signaled)
{
    r->cq = ibv_create_cq(r->context, cqe, NULL, NULL, 0);
    if (!r->cq)
        die("ibv_create_cq");
    struct ibv_qp_init_attr init = {
        .send_cq = r->cq, .recv_cq = r->cq, .cap = cap, .qp_type = type, .sq_sig_all = all_signaled};
    r->qp = ibv_create_qp(r->pd, &init);
    if (!r->qp)
        die("ibv_create_qp");
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT,
                               .port_num = 1,
                               .qkey = 0x11111111,
                               .qp_access_flags =
                                   IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC};
    int last = type == IBV_QPT_UD ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS;
    if (ibv_modify_qp(r->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | last))
        die("ibv_modify_qp to INIT");
}

/* Exchanges endpoints with the peer. mr is the memory that the peer may access, or NULL. */
static inline struct endpoint rdma_exchange(struct rdma *r, struct ibv_mr *mr)
{
    struct endpoint mine = {.qpn = r->qp->qp_num, .psn = (getpid() * 7919) & 0xffffff};
    if (ibv_query_gid(r->context, 1, 0, &mine.gid))
        die("ibv_query_gid");
    if (mr) {
        mine.address = (uintptr_t)mr->addr;
        mine.rkey = mr->rkey;
    }
    exchange(r->connection, &mine, &r->peer, sizeof mine);
    return mine;
}

/* Exchanges endpoints and connects an RC queue pair. Afterwards both programs can send. */
static inline void rdma_connect(struct rdma *r, struct ibv_mr *mr, struct rdma_options options)
{
    struct endpoint mine = rdma_exchange(r, mr);
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTR,
                               .path_mtu = IBV_MTU_1024,
                               .dest_qp_num = r->peer.qpn,
                               .rq_psn = r->peer.psn,
                               .max_dest_rd_atomic = 4,
                               .min_rnr_timer = 12,
                               .ah_attr = {.is_global = 1, .port_num = 1, .grh = {.dgid = r->peer.gid, .hop_limit = 64}}};
    if (ibv_modify_qp(r->qp, &attr,
                      IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                          IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER))
        die("ibv_modify_qp to RTR");
    struct ibv_qp_attr rts = {.qp_state = IBV_QPS_RTS,
                              .sq_psn = mine.psn,
                              .timeout = options.timeout ? options.timeout : 14,
                              .retry_cnt = options.retry_cnt ? options.retry_cnt : 7,
                              .rnr_retry = options.rnr_retry,
                              .max_rd_atomic = 4};
    if (ibv_modify_qp(r->qp, &rts,
                      IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                          IBV_QP_MAX_QP_RD_ATOMIC))
        die("ibv_modify_qp to RTS");
    barrier(r->connection);
}

/* Waits for the next completion. */
static inline struct ibv_wc rdma_wait(struct rdma *r)
{
    struct ibv_wc wc;
    int n;
    while ((n = ibv_poll_cq(r->cq, 1, &wc)) == 0)
        ;
    if (n < 0)
        die("ibv_poll_cq");
    return wc;
}

/* Waits for the next completion, which must be a success. */
static inline struct ibv_wc rdma_expect(struct rdma *r, const char *what)
{
    struct ibv_wc wc = rdma_wait(r);
    if (wc.status != IBV_WC_SUCCESS) {
        fprintf(stderr, "%s: %s\n", what, ibv_wc_status_str(wc.status));
        exit(1);
    }
    return wc;
}
