/* Calls verbs in a fixed order on two queue pairs that are connected to each other, and prints the result of each call and
 * each completion. The Rust test of the same name makes the same calls in a simulation and on an embedded device. */
#include <errno.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define MESSAGES 4

static const char *name_of(int error)
{
    static const char *names[] = {[EIO] = "EIO", [ENOMEM] = "ENOMEM", [EINVAL] = "EINVAL", [EAGAIN] = "EAGAIN"};
    return error < (int)(sizeof names / sizeof *names) && names[error] ? names[error] : "another error";
}

static void print(const char *call, int error)
{
    printf("%s %s\n", call, error ? name_of(error) : "ok");
}

static int modify(struct ibv_qp *qp, struct ibv_qp_attr attr, int mask)
{
    int error = ibv_modify_qp(qp, &attr, mask);
    print("modify_qp", error);
    return error;
}

static void connect_to(struct ibv_context *context, struct ibv_qp *qp, struct ibv_qp *peer)
{
    union ibv_gid gid;
    ibv_query_gid(context, 1, 0, &gid);
    if (modify(qp,
               (struct ibv_qp_attr){.qp_state = IBV_QPS_INIT,
                                    .port_num = 1,
                                    .qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE},
               IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS))
        return;
    if (modify(qp,
               (struct ibv_qp_attr){.qp_state = IBV_QPS_RTR,
                                    .path_mtu = IBV_MTU_1024,
                                    .dest_qp_num = peer->qp_num,
                                    .rq_psn = 7,
                                    .max_dest_rd_atomic = 1,
                                    .min_rnr_timer = 12,
                                    .ah_attr = {.is_global = 1, .port_num = 1, .grh = {.dgid = gid, .hop_limit = 64}}},
               IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                   IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER))
        return;
    modify(qp,
           (struct ibv_qp_attr){.qp_state = IBV_QPS_RTS, .sq_psn = 7, .timeout = 14, .retry_cnt = 1, .rnr_retry = 7,
                                .max_rd_atomic = 1},
           IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
               IBV_QP_MAX_QP_RD_ATOMIC);
}

static void print_event(struct ibv_context *context)
{
    struct ibv_async_event event;
    if (ibv_get_async_event(context, &event) == 0) {
        printf("event %d\n", event.event_type);
        ibv_ack_async_event(&event);
    }
}

/* Each argument stands for an asynchronous event to wait for. `lost`: one of them takes the place of a completion. */
int main(int count, char **arguments)
{
    int may_lose = count > 1 && !strcmp(arguments[1], "lost");
    static char buffers[3][256];
    struct ibv_device **list = ibv_get_device_list(NULL);
    struct ibv_context *context = ibv_open_device(list[0]);
    struct ibv_pd *pd = NULL;
    struct ibv_mr *mr[3];
    struct ibv_cq *cq = NULL;
    struct ibv_qp *qp[2] = {NULL, NULL};
    for (int i = 0; i < 2; i++) {
        struct ibv_pd *made = ibv_alloc_pd(context);
        print("alloc_pd", made ? 0 : errno);
        pd = made ? made : pd;
    }
    for (int i = 0; i < 3; i++) {
        mr[i] = ibv_reg_mr(pd, buffers[i], sizeof buffers[i], IBV_ACCESS_LOCAL_WRITE);
        print("reg_mr", mr[i] ? 0 : errno);
    }
    for (int i = 0; i < 2; i++) {
        struct ibv_cq *made = ibv_create_cq(context, 64, NULL, NULL, 0);
        print("create_cq", made ? 0 : errno);
        cq = made ? made : cq;
    }
    struct ibv_srq_init_attr shared = {.attr = {.max_wr = 4, .max_sge = 1}};
    print("create_srq", ibv_create_srq(pd, &shared) ? 0 : errno);
    for (int i = 0; i < 3; i++) {
        struct ibv_qp_init_attr init = {.send_cq = cq,
                                        .recv_cq = cq,
                                        .cap = {16, 16, 1, 1, 0},
                                        .qp_type = IBV_QPT_RC,
                                        .sq_sig_all = 1};
        struct ibv_qp *made = ibv_create_qp(pd, &init);
        print("create_qp", made ? 0 : errno);
        if (made && (!qp[0] || !qp[1]))
            qp[qp[0] ? 1 : 0] = made;
    }
    connect_to(context, qp[0], qp[1]);
    connect_to(context, qp[1], qp[0]);
    struct ibv_mr *usable = mr[0] ? mr[0] : mr[1] ? mr[1] : mr[2];
    struct ibv_sge sge = {(uintptr_t)usable->addr, 16, usable->lkey};
    int receives = 0;
    for (uint64_t i = 0; i < MESSAGES; i++) {
        struct ibv_recv_wr wr = {.wr_id = 100 + i, .sg_list = &sge, .num_sge = 1}, *bad;
        int error = ibv_post_recv(qp[1], &wr, &bad);
        print("post_recv", error);
        receives += !error;
    }
    /* Each send waits for its completion, so that the order is the same everywhere. */
    int lost = 0;
    for (uint64_t i = 0; i < (uint64_t)receives && !lost; i++) {
        struct ibv_send_wr wr = {.wr_id = i, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND}, *bad;
        struct ibv_wc wc;
        int error = ibv_post_send(qp[0], &wr, &bad);
        print("post_send", error);
        while (!error) {
            int polled = ibv_poll_cq(cq, 1, &wc);
            struct pollfd event = {.fd = context->async_fd, .events = POLLIN};
            lost = polled <= 0 && may_lose && poll(&event, 1, 0) == 1;
            if (lost) {
                printf("send %d lost\n", (int)i);
                break;
            }
            if (polled != 1 || wc.wr_id >= 100)
                continue;
            printf("send %d status %d vendor_err %u\n", (int)wc.wr_id, wc.status, wc.vendor_err);
            break;
        }
    }
    struct ibv_port_attr port = {.state = IBV_PORT_DOWN};
    ibv_query_port(context, 1, &port);
    printf("port %s\n", port.state == IBV_PORT_ACTIVE ? "active" : "down");
    for (int i = 1; i < count; i++)
        print_event(context);
    struct ibv_pd *last = ibv_alloc_pd(context);
    print("alloc_pd", last ? 0 : errno);
    return 0;
}
