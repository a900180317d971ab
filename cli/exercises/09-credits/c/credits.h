#pragma once
#include "connect.h"

/* The receives that the server posts at the begin. */
#define RECEIVES 8

/* On the server: a receive was posted again, for the reposted-th time (1, 2, …). scratch is the begin of a registered
 * region of 64 bytes that the function may use. */
void return_credit(struct rdma *r, struct ibv_mr *scratch, uint64_t reposted);

/* On the client, before message number sent (0, 1, …): returns when the server has a receive for it. The server may
 * write to the region mr, which is zero at first and to which r->peer of the server points. */
void take_credit(struct rdma *r, struct ibv_mr *mr, uint64_t sent);
