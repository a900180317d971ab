#include "store.h"

static uint64_t read_version(struct rdma *r)
{
    return *(const uint64_t *)read_slot(r, 0, sizeof(uint64_t));
}

void get(struct rdma *r, uint64_t value[WORDS])
{
    uint64_t before, after;
    do {
        before = read_version(r);
        const struct slot *slot = read_slot(r, 0, sizeof *slot);
        memcpy(value, slot->value, sizeof slot->value);
        after = read_version(r);
    } while (before % 2 || before != after);
}
