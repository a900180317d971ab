#pragma once
#include "connect.h"

#define BLOCKS 200
#define BLOCK_BYTES 64
/* The places of the send queue. */
#define QUEUE 16

/* Writes every block of mr to the same offset of the peer's region, and returns when all WRITEs are complete. */
void write_blocks(struct rdma *r, struct ibv_mr *mr);
