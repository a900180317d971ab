#include "endpoint.h"
#include <stdio.h>

int connect_queue_pair(struct ibv_qp *qp, const struct endpoint *mine, const struct endpoint *peer)
{
    /* Here: INIT, RTR, RTS. After a transition that fails: perror("ibv_modify_qp to RTR"); return -1; */
    (void)qp, (void)mine, (void)peer;
    fprintf(stderr, "connect_queue_pair is not written yet\n");
    return -1;
}
