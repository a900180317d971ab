/* ./program server PORT, ./program client PORT. The grader uses its own copy of this file. */
#include "store.h"

#define GETS 100

/* What the server does before each part of a READ: nothing, begin a change, finish it, or both. */
static const char STEPS[] = "C......B..F..";

static char buffer[16384] __attribute__((aligned(64)));
static struct ibv_mr *mr;

static void read_part(struct rdma *r, uint64_t offset, uint64_t at, uint32_t bytes)
{
    char step = 'S';
    exchange(r->connection, &step, &step, 1);
    struct ibv_sge sge = {.addr = (uintptr_t)buffer + at, .length = bytes, .lkey = mr->lkey};
    struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_READ}, *bad;
    wr.wr.rdma.remote_addr = r->peer.address + offset + at;
    wr.wr.rdma.rkey = r->peer.rkey;
    if (ibv_post_send(r->qp, &wr, &bad))
        die("ibv_post_send");
    rdma_expect(r, "READ");
}

const void *read_slot(struct rdma *r, uint64_t offset, uint32_t bytes)
{
    if (bytes > sizeof buffer) {
        fprintf(stderr, "read_slot: more bytes than the buffer has\n");
        exit(1);
    }
    /* A card may fetch the bytes of one READ in any order: here, the second half comes first. Eight bytes are whole. */
    uint32_t first = bytes > 8 ? bytes / 16 * 8 : 0;
    read_part(r, offset, first, bytes - first);
    if (first)
        read_part(r, offset, 0, first);
    return buffer;
}

/* The server's program. What it does depends on the number of READs, and not on the time. */
static void serve(int connection)
{
    volatile struct slot *slot = (struct slot *)buffer;
    uint64_t round = 0;
    for (size_t step = 0;; step++) {
        char request;
        if (read(connection, &request, 1) != 1)
            die("the client has ended");
        if (request != 'S')
            break;
        char action = STEPS[step % (sizeof STEPS - 1)];
        if (action == 'B' || action == 'C') {
            slot->version++;
            round++;
            for (int i = 0; i < WORDS / 2; i++)
                slot->value[i] = round;
        }
        if (action == 'F' || action == 'C') {
            for (int i = WORDS / 2; i < WORDS; i++)
                slot->value[i] = round;
            slot->version++;
        }
        __sync_synchronize();
        if (write(connection, &request, 1) != 1)
            die("write");
    }
}

int main(int argc, char **argv)
{
    if (argc < 3)
        return 2;
    int is_server = !strcmp(argv[1], "server"), port = atoi(argv[2]);
    struct rdma r = {0};
    rdma_open(&r);
    /* The server's slot alone can be read. */
    size_t length = is_server ? sizeof(struct slot) : sizeof buffer;
    mr = ibv_reg_mr(r.pd, buffer, length, IBV_ACCESS_LOCAL_WRITE | (is_server ? IBV_ACCESS_REMOTE_READ : 0));
    if (!mr)
        die("ibv_reg_mr");
    struct ibv_qp_cap cap = {.max_send_wr = 16, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1};
    rdma_create(&r, IBV_QPT_RC, 64, cap, 1);
    r.connection = is_server ? exchange_listen(port) : exchange_dial(port);
    rdma_connect(&r, mr, (struct rdma_options){0});
    if (is_server) {
        serve(r.connection);
        return 0;
    }
    int torn = 0, distinct = 0;
    uint64_t last = UINT64_MAX;
    for (int i = 0; i < GETS; i++) {
        uint64_t value[WORDS] = {0};
        get(&r, value);
        int is_torn = 0;
        for (int word = 1; word < WORDS; word++)
            is_torn |= value[word] != value[0];
        torn += is_torn;
        distinct += value[0] != last;
        last = value[0];
    }
    printf("values: %s\ntorn: %d\n", distinct > 2 ? "several" : "one", torn);
    if (write(r.connection, "Q", 1) != 1)
        die("write");
    return 0;
}
