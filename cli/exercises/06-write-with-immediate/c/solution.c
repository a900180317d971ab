#include "slots.h"

int prepare(struct ibv_qp *qp)
{
    (void)qp;
    return 0;
}

void write_slot(struct rdma *r, struct ibv_mr *mr, int slot)
{
    (void)r, (void)mr, (void)slot;
    fprintf(stderr, "write_slot is not written yet\n");
    exit(1);
}

int next_slot(struct rdma *r)
{
    (void)r;
    fprintf(stderr, "next_slot is not written yet\n");
    exit(1);
}
