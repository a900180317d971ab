#pragma once
#include "connect.h"

struct message {
    uint32_t number; /* 1, 2, … */
    uint32_t value;
};

/* Connects again, with a new queue pair on both sides. For the client; the server's main does its part. */
void reconnect(struct rdma *r);

/* On the client: sends the message at the begin of mr, until that succeeds. */
void deliver(struct rdma *r, struct ibv_mr *mr);

/* On the server: called with each message that arrives. Adds the value to *sum, once for each message. */
void count(const struct message *message, uint32_t *sum);
