#include "endpoint.h"
#include <stdio.h>

int connect_queue_pair(struct ibv_qp *qp, const struct endpoint *mine, const struct endpoint *peer)
{
    struct ibv_qp_attr init = {.qp_state = IBV_QPS_INIT, .port_num = 1};
    if (ibv_modify_qp(qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS)) {
        perror("ibv_modify_qp to INIT");
        return -1;
    }
    struct ibv_qp_attr rtr = {.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = peer->qpn};
    rtr.rq_psn = peer->psn;
    rtr.max_dest_rd_atomic = 1;
    rtr.min_rnr_timer = 12;
    rtr.ah_attr.is_global = 1;
    rtr.ah_attr.port_num = 1;
    rtr.ah_attr.grh.dgid = peer->gid;
    rtr.ah_attr.grh.hop_limit = 64;
    if (ibv_modify_qp(qp, &rtr,
                      IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                          IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER)) {
        perror("ibv_modify_qp to RTR");
        return -1;
    }
    struct ibv_qp_attr rts = {.qp_state = IBV_QPS_RTS, .sq_psn = mine->psn, .max_rd_atomic = 1};
    rts.timeout = 14;
    rts.retry_cnt = 7;
    rts.rnr_retry = 7;
    if (ibv_modify_qp(qp, &rts,
                      IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                          IBV_QP_MAX_QP_RD_ATOMIC)) {
        perror("ibv_modify_qp to RTS");
        return -1;
    }
    return 0;
}
