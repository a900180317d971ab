/* ./program server PORT, ./program client PORT TEXT. The grader uses its own copy of this file. */
#include "datagram.h"

int main(int argc, char **argv)
{
    if (argc < 3)
        return 2;
    int is_server = !strcmp(argv[1], "server"), port = atoi(argv[2]);
    static char buffer[4096];
    memset(buffer, '?', sizeof buffer);
    struct rdma r = {0};
    rdma_open(&r);
    struct ibv_mr *mr = ibv_reg_mr(r.pd, buffer, sizeof buffer, IBV_ACCESS_LOCAL_WRITE);
    if (!mr)
        die("ibv_reg_mr");
    struct ibv_qp_cap cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1};
    rdma_create(&r, IBV_QPT_UD, 16, cap, 1);
    r.connection = is_server ? exchange_listen(port) : exchange_dial(port);
    struct endpoint mine = rdma_exchange(&r, NULL);
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTR};
    if (ibv_modify_qp(r.qp, &attr, IBV_QP_STATE))
        die("ibv_modify_qp to RTR");
    attr.qp_state = IBV_QPS_RTS;
    attr.sq_psn = mine.psn;
    if (ibv_modify_qp(r.qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN))
        die("ibv_modify_qp to RTS");
    if (is_server && (errno = post_datagram_receive(r.qp, mr)))
        die("post_datagram_receive");
    barrier(r.connection);
    if (!is_server) {
        struct ibv_ah_attr to = {.is_global = 1, .port_num = 1, .grh = {.dgid = r.peer.gid, .hop_limit = 64}};
        struct ibv_ah *ah = ibv_create_ah(r.pd, &to);
        if (!ah)
            die("ibv_create_ah");
        int bytes = snprintf(buffer, sizeof buffer, "%s", argc > 3 ? argv[3] : "");
        struct ibv_sge sge = {.addr = (uintptr_t)buffer, .length = bytes, .lkey = mr->lkey};
        struct ibv_send_wr send = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND}, *bad;
        send.wr.ud.ah = ah;
        send.wr.ud.remote_qpn = r.peer.qpn;
        send.wr.ud.remote_qkey = 0x11111111;
        if (ibv_post_send(r.qp, &send, &bad))
            die("ibv_post_send");
    }
    struct ibv_wc wc = rdma_expect(&r, is_server ? "the receive failed" : "the send failed");
    if (is_server) {
        int bytes = 0;
        const char *payload = datagram_payload(mr, &wc, &bytes);
        printf("datagram: %.*s\n", bytes, payload);
    }
    return 0;
}
