#pragma once
#include "connect.h"

/* The longest payload. */
#define PAYLOAD 1024

/* Posts a receive for one datagram into the begin of mr, which has 4096 bytes. Returns 0 or an errno. */
int post_datagram_receive(struct ibv_qp *qp, struct ibv_mr *mr);

/* Finds the payload of a datagram that was received into mr: returns its address, and its length in bytes. */
const char *datagram_payload(const struct ibv_mr *mr, const struct ibv_wc *wc, int *bytes);
