/* ./program server PORT, ./program client PORT TEXT. The grader uses its own copy of this file. */
#include "endpoint.h"
#include "exchange.h"

#define BYTES 4096

int main(int argc, char **argv)
{
    if (argc < 3)
        return 2;
    int is_server = !strcmp(argv[1], "server"), port = atoi(argv[2]);
    struct ibv_device **list = ibv_get_device_list(NULL);
    struct ibv_context *context = list && list[0] ? ibv_open_device(list[0]) : NULL;
    if (!context)
        die("open the device");
    struct ibv_pd *pd = ibv_alloc_pd(context);
    struct ibv_cq *cq = ibv_create_cq(context, 16, NULL, NULL, 0);
    static char buffer[BYTES];
    struct ibv_mr *mr = ibv_reg_mr(pd, buffer, BYTES, IBV_ACCESS_LOCAL_WRITE);
    struct ibv_qp_init_attr init = {.send_cq = cq,
                                    .recv_cq = cq,
                                    .cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1},
                                    .qp_type = IBV_QPT_RC,
                                    .sq_sig_all = 1};
    struct ibv_qp *qp = ibv_create_qp(pd, &init);
    if (!mr || !qp)
        die("create the objects");
    int connection = is_server ? exchange_listen(port) : exchange_dial(port);
    struct endpoint mine = {.qpn = qp->qp_num, .psn = (getpid() * 7919) & 0xffffff}, peer;
    if (ibv_query_gid(context, 1, 0, &mine.gid))
        die("ibv_query_gid");
    exchange(connection, &mine, &peer, sizeof mine);
    if (connect_queue_pair(qp, &mine, &peer))
        return 1;

    struct ibv_sge sge = {.addr = (uintptr_t)buffer, .length = BYTES, .lkey = mr->lkey};
    if (is_server) {
        struct ibv_recv_wr receive = {.sg_list = &sge, .num_sge = 1}, *bad;
        if (ibv_post_recv(qp, &receive, &bad))
            die("ibv_post_recv");
    }
    barrier(connection);
    if (!is_server) {
        snprintf(buffer, BYTES, "%s", argc > 3 ? argv[3] : "");
        struct ibv_send_wr send = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND}, *bad;
        if (ibv_post_send(qp, &send, &bad))
            die("ibv_post_send");
    }
    struct ibv_wc wc;
    while (ibv_poll_cq(cq, 1, &wc) == 0)
        ;
    if (wc.status != IBV_WC_SUCCESS) {
        fprintf(stderr, "the work request failed: %s\n", ibv_wc_status_str(wc.status));
        return 1;
    }
    if (is_server)
        printf("received: %s\n", buffer);
    fflush(stdout);
    barrier(connection);
    return 0;
}
