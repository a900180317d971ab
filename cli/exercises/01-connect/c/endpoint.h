#pragma once
#include <infiniband/verbs.h>
#include <stdint.h>

/* What a program tells its peer. */
struct endpoint {
    uint32_t qpn, psn;
    union ibv_gid gid;
};

/* Takes a queue pair from RESET to RTS. Returns 0, or -1 after a message. */
int connect_queue_pair(struct ibv_qp *qp, const struct endpoint *mine, const struct endpoint *peer);
