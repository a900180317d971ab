/* Two queue pairs of one process exchange messages and a WRITE. Compiled with -DBUGS, its error handling has six bugs that
 * programs have: search for BUG. Without it, every error is reported, everything is released, and the exit code is 1. */
#include <infiniband/verbs.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MESSAGES 4
#define SIZE 64

struct message {
    int index;
    int is_receive;
};

struct transfer {
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_cq *cq;
    struct ibv_mr *out, *in;
    struct ibv_qp *qp[2];
    char *buffers;
    struct message *messages[2 * MESSAGES];
    int outstanding;
};

static int complain(const char *what)
{
    fprintf(stderr, "six_bugs: %s failed\n", what);
    return 1;
}

static int open_first_device(struct transfer *t)
{
    int count = 0;
    struct ibv_device **list = ibv_get_device_list(&count);
    if (!list || count == 0) {
        if (list)
            ibv_free_device_list(list);
        return complain("ibv_get_device_list");
    }
    t->context = ibv_open_device(list[0]);
    ibv_free_device_list(list);
    return t->context ? 0 : complain("ibv_open_device");
}

static int create_queue_pair(struct transfer *t, int index)
{
    struct ibv_qp_init_attr init = {.send_cq = t->cq,
                                    .recv_cq = t->cq,
                                    .cap = {.max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 1, .max_recv_sge = 1},
                                    .qp_type = IBV_QPT_RC,
                                    .sq_sig_all = 1};
    t->qp[index] = ibv_create_qp(t->pd, &init);
    return t->qp[index] ? 0 : complain("ibv_create_qp");
}

static int connect_queue_pair(struct transfer *t, int index)
{
    union ibv_gid gid;
    struct ibv_qp *qp = t->qp[index];
    if (ibv_query_gid(t->context, 1, 0, &gid))
        return complain("ibv_query_gid");
    struct ibv_qp_attr init = {.qp_state = IBV_QPS_INIT,
                               .port_num = 1,
                               .qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE};
    struct ibv_qp_attr rtr = {.qp_state = IBV_QPS_RTR,
                              .path_mtu = IBV_MTU_1024,
                              .dest_qp_num = t->qp[1 - index]->qp_num,
                              .rq_psn = 7,
                              .max_dest_rd_atomic = 1,
                              .min_rnr_timer = 12,
                              .ah_attr = {.is_global = 1, .port_num = 1, .grh = {.dgid = gid, .hop_limit = 64}}};
    struct ibv_qp_attr rts = {.qp_state = IBV_QPS_RTS, .sq_psn = 7, .timeout = 14, .retry_cnt = 7, .rnr_retry = 1,
                              .max_rd_atomic = 1};
    if (ibv_modify_qp(qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) ||
        ibv_modify_qp(qp, &rtr,
                      IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                          IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) ||
        ibv_modify_qp(qp, &rts,
                      IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                          IBV_QP_MAX_QP_RD_ATOMIC))
        return complain("ibv_modify_qp");
    return 0;
}

/* Creates everything. What was created is released by the caller, whatever the result. */
static int set_up(struct transfer *t)
{
    if (open_first_device(t))
        return 1;
    t->pd = ibv_alloc_pd(t->context);
    if (!t->pd)
        return complain("ibv_alloc_pd");
#ifdef BUGS
    /* BUG 5: retries for ever. */
    while (!(t->cq = ibv_create_cq(t->context, 64, NULL, NULL, 0)))
        ;
#else
    t->cq = ibv_create_cq(t->context, 64, NULL, NULL, 0);
    if (!t->cq)
        return complain("ibv_create_cq");
#endif
    t->buffers = calloc(2 * MESSAGES, SIZE);
    if (!t->buffers)
        return complain("calloc");
    t->out = ibv_reg_mr(t->pd, t->buffers, MESSAGES * SIZE, IBV_ACCESS_LOCAL_WRITE);
    if (!t->out)
        return complain("ibv_reg_mr");
    t->in = ibv_reg_mr(t->pd, t->buffers + MESSAGES * SIZE, MESSAGES * SIZE,
                       IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
    if (!t->in) {
#ifdef BUGS
        /* BUG 4: leaks the region that was registered before. */
        t->out = NULL;
#endif
        return complain("ibv_reg_mr");
    }
    for (int i = 0; i < 2; i++)
        if (create_queue_pair(t, i))
            return 1;
    for (int i = 0; i < 2; i++)
        if (connect_queue_pair(t, i))
            return 1;
    return 0;
}

static int tear_down(struct transfer *t)
{
    int failed = 0;
    for (int i = 0; i < 2; i++)
        if (t->qp[i] && ibv_destroy_qp(t->qp[i]))
            failed = complain("ibv_destroy_qp");
    if (t->in && ibv_dereg_mr(t->in))
        failed = complain("ibv_dereg_mr");
    if (t->out && ibv_dereg_mr(t->out))
        failed = complain("ibv_dereg_mr");
    if (t->cq && ibv_destroy_cq(t->cq))
        failed = complain("ibv_destroy_cq");
    if (t->pd && ibv_dealloc_pd(t->pd))
        failed = complain("ibv_dealloc_pd");
    if (t->context && ibv_close_device(t->context))
        failed = complain("ibv_close_device");
    for (int i = 0; i < 2 * MESSAGES; i++)
        free(t->messages[i]);
    free(t->buffers);
    return failed;
}

static int post_receive(struct transfer *t, int index)
{
    struct message *message = t->messages[index];
    struct ibv_sge sge = {(uintptr_t)(t->buffers + (MESSAGES + index) * SIZE), SIZE, t->in->lkey};
    struct ibv_recv_wr wr = {.wr_id = (uintptr_t)message, .sg_list = &sge, .num_sge = 1}, *bad;
    return ibv_post_recv(t->qp[1], &wr, &bad);
}

static int post_message(struct transfer *t, int index)
{
    struct message *message = t->messages[MESSAGES + index];
    struct ibv_sge sge = {(uintptr_t)(t->buffers + index * SIZE), SIZE, t->out->lkey};
    struct ibv_send_wr wr = {.wr_id = (uintptr_t)message, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND}, *bad;
    return ibv_post_send(t->qp[0], &wr, &bad);
}

/* Takes the completions of everything that is outstanding. Returns 1 if one failed. */
static int complete(struct transfer *t)
{
    struct ibv_wc wc;
    int failed = 0;
    while (t->outstanding > 0) {
        int polled = ibv_poll_cq(t->cq, 1, &wc);
        if (polled < 0)
            return complain("ibv_poll_cq");
        if (polled == 0)
            continue;
        t->outstanding--;
        struct message *message = (struct message *)(uintptr_t)wc.wr_id;
        if (wc.status != IBV_WC_SUCCESS) {
            fprintf(stderr, "six_bugs: %s %d failed: %s\n", message->is_receive ? "receive" : "send", message->index,
                    ibv_wc_status_str(wc.status));
            if (!failed) {
                /* The peer of a failed queue pair waits for messages that never come: stop both. */
                struct ibv_qp_attr error = {.qp_state = IBV_QPS_ERR};
                for (int i = 0; i < 2; i++)
                    if (ibv_modify_qp(t->qp[i], &error, IBV_QP_STATE))
                        return complain("ibv_modify_qp");
#ifdef BUGS
                /* BUG 2: frees what the work requests that are flushed now still name. */
                for (int i = 0; i < 2 * MESSAGES && wc.status != IBV_WC_WR_FLUSH_ERR; i++) {
                    free(t->messages[i]);
                    t->messages[i] = NULL;
                }
#endif
            }
            failed = 1;
        }
    }
    return failed;
}

static int exchange_messages(struct transfer *t)
{
    int failed = 0;
    for (int i = 0; i < 2 * MESSAGES; i++) {
        t->messages[i] = malloc(sizeof *t->messages[i]);
        if (!t->messages[i])
            return complain("malloc");
        t->messages[i]->index = i % MESSAGES;
        t->messages[i]->is_receive = i < MESSAGES;
    }
    for (int i = 0; i < MESSAGES; i++) {
        snprintf(t->buffers + i * SIZE, SIZE, "message %d", i);
        if (post_receive(t, i))
            failed = complain("ibv_post_recv");
        else
            t->outstanding++;
    }
    for (int i = 0; i < MESSAGES && !failed; i++) {
        int error = post_message(t, i);
        if (error)
            failed = complain("ibv_post_send");
#ifdef BUGS
        /* BUG 3: waits for a completion that never comes. */
        t->outstanding++;
#else
        if (!error)
            t->outstanding++;
#endif
    }
    if (failed) {
        /* Receives without a message complete only when they are flushed. */
        struct ibv_qp_attr error = {.qp_state = IBV_QPS_ERR};
        for (int i = 0; i < 2; i++)
            if (ibv_modify_qp(t->qp[i], &error, IBV_QP_STATE))
                return complain("ibv_modify_qp");
    }
    return complete(t) || failed;
}

static int write_once(struct transfer *t)
{
    struct message *message = t->messages[MESSAGES];
    struct ibv_sge sge = {(uintptr_t)t->buffers, SIZE, t->out->lkey};
    struct ibv_send_wr wr = {.wr_id = (uintptr_t)message,
                             .sg_list = &sge,
                             .num_sge = 1,
                             .opcode = IBV_WR_RDMA_WRITE,
                             .wr.rdma = {(uintptr_t)(t->buffers + (2 * MESSAGES - 1) * SIZE), t->in->rkey}};
    struct ibv_send_wr *bad;
    struct ibv_wc wc;
    int polled;
#ifdef BUGS
    /* BUG 1: ignores a failed post. */
    ibv_post_send(t->qp[0], &wr, &bad);
#else
    if (ibv_post_send(t->qp[0], &wr, &bad))
        return complain("ibv_post_send");
#endif
    while ((polled = ibv_poll_cq(t->cq, 1, &wc)) == 0)
        ;
    if (polled < 0)
        return complain("ibv_poll_cq");
#ifndef BUGS
    /* BUG 6: reports success after a failed completion. */
    if (wc.status != IBV_WC_SUCCESS)
        return complain("the WRITE");
#endif
    return 0;
}

int main(void)
{
    struct transfer transfer = {0};
    int failed = set_up(&transfer);
    if (!failed)
        failed = exchange_messages(&transfer);
    if (!failed)
        failed = write_once(&transfer);
    if (!failed)
        for (int i = 0; i < MESSAGES - 1; i++)
            failed |= strcmp(transfer.buffers + i * SIZE, transfer.buffers + (MESSAGES + i) * SIZE) != 0;
    if (tear_down(&transfer))
        failed = 1;
    if (!failed)
        printf("%d messages and a WRITE arrived\n", MESSAGES);
    return failed;
}
