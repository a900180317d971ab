#pragma once
#include "connect.h"

#define WORDS 1000

struct slot {
    uint64_t version; /* odd while the value changes */
    uint64_t value[WORDS];
};

/* Reads bytes of the server's slot, from this offset on, into the begin of the client's buffer, and returns the buffer.
 * The bytes of one READ are fetched in any order, and the server may change the slot at any time. */
const void *read_slot(struct rdma *r, uint64_t offset, uint32_t bytes);

/* On the client: copies a value that is whole from the server's slot to value. */
void get(struct rdma *r, uint64_t value[WORDS]);
