#include "messages.h"

void deliver(struct rdma *r, struct ibv_mr *mr)
{
    (void)r, (void)mr;
    fprintf(stderr, "deliver is not written yet\n");
    exit(1);
}

void count(const struct message *message, uint32_t *sum)
{
    *sum += message->value;
}
