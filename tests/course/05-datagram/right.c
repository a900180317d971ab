#include "datagram.h"

#define GRH 40

int post_datagram_receive(struct ibv_qp *qp, struct ibv_mr *mr)
{
    struct ibv_sge sge = {.addr = (uintptr_t)mr->addr, .length = GRH + PAYLOAD, .lkey = mr->lkey};
    struct ibv_recv_wr wr = {.sg_list = &sge, .num_sge = 1}, *bad;
    return ibv_post_recv(qp, &wr, &bad);
}

const char *datagram_payload(const struct ibv_mr *mr, const struct ibv_wc *wc, int *bytes)
{
    *bytes = wc->byte_len - GRH;
    return (const char *)mr->addr + GRH;
}
