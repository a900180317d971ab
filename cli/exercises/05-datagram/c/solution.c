#include "datagram.h"

int post_datagram_receive(struct ibv_qp *qp, struct ibv_mr *mr)
{
    (void)qp, (void)mr;
    fprintf(stderr, "post_datagram_receive is not written yet\n");
    exit(1);
}

const char *datagram_payload(const struct ibv_mr *mr, const struct ibv_wc *wc, int *bytes)
{
    (void)wc;
    *bytes = 0;
    return mr->addr;
}
