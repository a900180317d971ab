#pragma once
#include "connect.h"

#define SLOTS 8
#define SLOT_BYTES 256

/* On the server, before the queue pair is connected. It is in INIT. Returns 0 or an errno. */
int prepare(struct ibv_qp *qp);

/* On the client: writes the text at the begin of mr into a slot of the server, and tells it the number. Waits for the
 * completion. */
void write_slot(struct rdma *r, struct ibv_mr *mr, int slot);

/* On the server: waits until a slot was written, and returns its number. */
int next_slot(struct rdma *r);
