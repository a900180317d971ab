#include "credits.h"

void return_credit(struct rdma *r, struct ibv_mr *scratch, uint64_t reposted)
{
    (void)r, (void)scratch, (void)reposted;
    fprintf(stderr, "return_credit is not written yet\n");
    exit(1);
}

void take_credit(struct rdma *r, struct ibv_mr *mr, uint64_t sent)
{
    (void)r, (void)mr, (void)sent;
    fprintf(stderr, "take_credit is not written yet\n");
    exit(1);
}
