/* `completions`: transfers messages between two queue pairs, and prints which completions come together and which are
 * notified. `resolve`: resolves addresses and routes, and prints the events. `lose`, `lose-one`: loses its device, and opens
 * it again; with `lose-one` it has another one, and with `lose-and-end` it ends first. The Rust tests do the same in a simulation and on an embedded device.
 *
 * `cards`: sends four messages from the first card to the second, and ends when all are complete; `cards-hang` never ends.
 * `release`: sends two, and deregisters the region of the first before it polls the completion, that of the second when
 * the message has arrived.
 * `wait N`: waits for the asynchronous event N, with a receive posted. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void check(int ok, const char *what)
{
    if (ok)
        return;
    perror(what);
    exit(1);
}

static void connect_to(struct ibv_qp *qp, struct ibv_qp *peer, union ibv_gid gid)
{
    struct ibv_qp_attr init = {.qp_state = IBV_QPS_INIT, .port_num = 1};
    struct ibv_qp_attr rtr = {.qp_state = IBV_QPS_RTR,
                              .path_mtu = IBV_MTU_1024,
                              .dest_qp_num = peer->qp_num,
                              .ah_attr = {.is_global = 1, .port_num = 1, .grh = {.dgid = gid, .hop_limit = 1}}};
    struct ibv_qp_attr rts = {.qp_state = IBV_QPS_RTS, .timeout = 18, .retry_cnt = 7, .rnr_retry = 7};
    check(!ibv_modify_qp(qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), "INIT");
    check(!ibv_modify_qp(qp, &rtr,
                         IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                             IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER),
          "RTR");
    check(!ibv_modify_qp(qp, &rts,
                         IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                             IBV_QP_MAX_QP_RD_ATOMIC),
          "RTS");
}

static struct ibv_wc next_completion(struct ibv_cq *cq)
{
    struct ibv_wc wc;
    int polled;
    while ((polled = ibv_poll_cq(cq, 1, &wc)) == 0)
        ;
    check(polled == 1, "ibv_poll_cq");
    return wc;
}

static int wait_for(struct ibv_cq *cq)
{
    struct ibv_wc wc = next_completion(cq);
    check(wc.status == IBV_WC_SUCCESS, "a completion");
    return (int)wc.wr_id;
}

static void post(struct ibv_qp *qp, struct ibv_sge *sge, uint64_t id)
{
    struct ibv_send_wr wr = {.wr_id = id, .sg_list = sge, .num_sge = 1, .opcode = IBV_WR_SEND}, *bad;
    check(!ibv_post_send(qp, &wr, &bad), "ibv_post_send");
}

static void complete_and_notify(void)
{
    static char buffer[64];
    struct ibv_device **list = ibv_get_device_list(NULL);
    struct ibv_context *context = ibv_open_device(list[0]);
    struct ibv_pd *pd = ibv_alloc_pd(context);
    struct ibv_mr *mr = ibv_reg_mr(pd, buffer, sizeof buffer, IBV_ACCESS_LOCAL_WRITE);
    struct ibv_comp_channel *channel = ibv_create_comp_channel(context);
    struct ibv_cq *sends = ibv_create_cq(context, 16, NULL, channel, 0);
    struct ibv_cq *receives = ibv_create_cq(context, 16, NULL, NULL, 0);
    struct ibv_qp_init_attr init = {
        .send_cq = sends, .recv_cq = receives, .cap = {8, 8, 1, 1, 0}, .qp_type = IBV_QPT_RC, .sq_sig_all = 1};
    struct ibv_qp *qp[2];
    union ibv_gid gid;
    check(!ibv_query_gid(context, 1, 0, &gid), "ibv_query_gid");
    for (int i = 0; i < 2; i++)
        check((qp[i] = ibv_create_qp(pd, &init)) != NULL, "ibv_create_qp");
    for (int i = 0; i < 2; i++)
        connect_to(qp[i], qp[1 - i], gid);
    struct ibv_sge sge = {(uintptr_t)buffer, 16, mr->lkey};
    for (uint64_t i = 0; i < 4; i++) {
        struct ibv_recv_wr wr = {.wr_id = i, .sg_list = &sge, .num_sge = 1}, *bad;
        check(!ibv_post_recv(qp[1], &wr, &bad), "ibv_post_recv");
    }
    struct ibv_wc wc;
    post(qp[0], &sge, 0);
    wait_for(receives);
    const char *held = ibv_poll_cq(sends, 1, &wc) == 0 ? "held" : "at once";
    post(qp[0], &sge, 1);
    wait_for(receives);
    int first = wait_for(sends);
    printf("first %s, then %d %d\n", held, first, wait_for(sends));
    // The device checks whether a notification is requested after it has written a completion. A verb waits for that.
    struct ibv_qp_attr attr;
    check(!ibv_query_qp(qp[0], &attr, IBV_QP_STATE, &init), "ibv_query_qp");
    for (uint64_t i = 2; i < 4; i++) {
        struct pollfd event = {.fd = channel->fd, .events = POLLIN};
        check(!ibv_req_notify_cq(sends, 0), "ibv_req_notify_cq");
        post(qp[0], &sge, i);
        if (i == 3)
            check(poll(&event, 1, 30000) == 1, "a notification");
        int completed = wait_for(sends);
        printf("%d %s\n", completed, poll(&event, 1, 0) == 1 ? "notified" : "silent");
    }
}

static void print_cm_event(struct rdma_event_channel *channel)
{
    struct rdma_cm_event *event;
    check(!rdma_get_cm_event(channel, &event), "rdma_get_cm_event");
    printf("%s %d\n", rdma_event_str(event->event), event->status);
    rdma_ack_cm_event(event);
}

/* The IPv4 address of the first device. */
static struct in_addr own_address(void)
{
    struct ibv_device **list = ibv_get_device_list(NULL);
    struct ibv_context *context = ibv_open_device(list[0]);
    struct in_addr address = {0};
    union ibv_gid gid;
    for (int index = 0; !address.s_addr && !ibv_query_gid(context, 1, index, &gid); index++)
        if (IN6_IS_ADDR_V4MAPPED((struct in6_addr *)gid.raw))
            memcpy(&address, gid.raw + 12, sizeof address);
    ibv_close_device(context);
    return address;
}

static void resolve_twice(void)
{
    struct rdma_event_channel *channel = rdma_create_event_channel();
    struct sockaddr_in peer = {.sin_family = AF_INET, .sin_port = htons(7471), .sin_addr = own_address()};
    struct rdma_cm_id *id[2];
    check(channel != NULL, "rdma_create_event_channel");
    for (int i = 0; i < 2; i++)
        check(!rdma_create_id(channel, &id[i], NULL, RDMA_PS_TCP), "rdma_create_id");
    for (int i = 0; i < 2; i++) {
        check(!rdma_resolve_addr(id[i], NULL, (struct sockaddr *)&peer, 2000), "rdma_resolve_addr");
        print_cm_event(channel);
    }
    check(!rdma_resolve_route(id[1], 2000), "rdma_resolve_route");
    print_cm_event(channel);
}

/* A queue pair that can receive, and its completion queue. */
struct endpoint {
    struct ibv_context *context;
    struct ibv_comp_channel *channel;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    struct ibv_sge sge;
    union ibv_gid gid;
};

/* Whether everything could be created: a device may fail meanwhile. */
static int create(struct endpoint *end, struct ibv_context *context)
{
    static char buffers[2][4096];
    static int used;
    char *buffer = buffers[used++ % 2];
    end->context = context;
    struct ibv_pd *pd = ibv_alloc_pd(context);
    struct ibv_mr *mr = pd ? ibv_reg_mr(pd, buffer, sizeof buffers[0], IBV_ACCESS_LOCAL_WRITE) : NULL;
    end->channel = ibv_create_comp_channel(context);
    end->cq = ibv_create_cq(context, 16, NULL, end->channel, 0);
    if (!mr || !end->cq || ibv_query_gid(context, 1, 0, &end->gid))
        return 0;
    struct ibv_qp_init_attr init = {
        .send_cq = end->cq, .recv_cq = end->cq, .cap = {8, 8, 1, 1, 0}, .qp_type = IBV_QPT_RC, .sq_sig_all = 1};
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1};
    end->sge = (struct ibv_sge){(uintptr_t)buffer, 1000, mr->lkey};
    end->qp = ibv_create_qp(pd, &init);
    return end->qp &&
           !ibv_modify_qp(end->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
}

static int receive(struct endpoint *end, uint64_t id)
{
    struct ibv_recv_wr wr = {.wr_id = id, .sg_list = &end->sge, .num_sge = 1}, *bad;
    return ibv_post_recv(end->qp, &wr, &bad);
}

/* Connects the first card to the second, which can receive four messages. */
static void connect_cards(struct endpoint ends[2])
{
    struct ibv_device **list = ibv_get_device_list(NULL);
    check(list[0] && list[1], "two cards");
    for (int i = 0; i < 2; i++)
        check(create(&ends[i], ibv_open_device(list[i])), "a queue pair");
    for (int i = 0; i < 2; i++)
        connect_to(ends[i].qp, ends[1 - i].qp, ends[1 - i].gid);
    for (uint64_t i = 0; i < 4; i++)
        check(!receive(&ends[1], i), "ibv_post_recv");
}

static void send_between_cards(int hang)
{
    struct endpoint ends[2];
    connect_cards(ends);
    for (uint64_t i = 0; i < 4; i++)
        post(ends[0].qp, &ends[0].sge, i);
    for (int i = 0; i < 4; i++)
        next_completion(ends[0].cq);
    while (hang)
        pause();
}

static void release(void)
{
    struct endpoint ends[2];
    void *context;
    connect_cards(ends);
    for (uint64_t i = 0; i < 2; i++) {
        struct ibv_sge sge = ends[0].sge;
        struct ibv_mr *mr = ibv_reg_mr(ends[0].qp->pd, (void *)sge.addr, sge.length, IBV_ACCESS_LOCAL_WRITE);
        struct ibv_cq *cq = ends[0].cq;
        check(mr && !ibv_req_notify_cq(cq, 0), "ibv_reg_mr");
        sge.lkey = mr->lkey;
        post(ends[0].qp, &sge, i);
        wait_for(ends[1].cq);
        if (i == 0)
            check(!ibv_get_cq_event(ends[0].channel, &cq, &context), "ibv_get_cq_event");
        check(!ibv_dereg_mr(mr), "ibv_dereg_mr");
        printf("status %d\n", next_completion(cq).status);
    }
}

static void print(const char *call, int error)
{
    printf("%s %s\n", call, error ? strerrorname_np(error) : "ok");
}

static int allocate(struct ibv_context *context)
{
    return ibv_alloc_pd(context) ? 0 : errno;
}

/* The next event, with its acknowledgement. */
static int next_event(struct ibv_context *context)
{
    struct ibv_async_event event;
    check(!ibv_get_async_event(context, &event), "ibv_get_async_event");
    ibv_ack_async_event(&event);
    return event.event_type;
}

/* A device that fails before everything exists is opened again. */
static void wait_for_event(int wanted)
{
    for (;;) {
        struct ibv_device **list = ibv_get_device_list(NULL);
        struct ibv_context *context = list[0] ? ibv_open_device(list[0]) : NULL;
        struct endpoint end;
        if (context && create(&end, context) && !receive(&end, 7)) {
            while (next_event(context) != wanted)
                ;
            printf("event %d\n", wanted);
            if (wanted == IBV_EVENT_DEVICE_FATAL)
                printf("receive status %d\n", next_completion(end.cq).status);
            print("alloc_pd", allocate(context));
            return;
        }
        if (context)
            ibv_close_device(context);
    }
}

static int count_devices(void)
{
    int count = 0;
    ibv_get_device_list(&count);
    return count;
}

static int is_in_sysfs(const char *name)
{
    DIR *folder = opendir("/sys/class/infiniband");
    int found = 0;
    for (struct dirent *entry; folder && (entry = readdir(folder));)
        found |= !strcmp(entry->d_name, name);
    if (folder)
        closedir(folder);
    return found;
}

/* Opens the device with this name, if it is listed. */
static struct ibv_context *open_named(const char *name)
{
    for (struct ibv_device **list = ibv_get_device_list(NULL); list && *list; list++)
        if (!strcmp(ibv_get_device_name(*list), name))
            return ibv_open_device(*list);
    return NULL;
}

static void lose_device(const char *mode)
{
    int has_another = !strcmp(mode, "lose-one");
    struct ibv_device **list = ibv_get_device_list(NULL), *device = list[0];
    const char *name = ibv_get_device_name(device);
    struct ibv_context *context = ibv_open_device(device), *again;
    struct ibv_device_attr attributes;
    struct endpoint end;
    check(create(&end, context), "a queue pair");
    print("post_recv", receive(&end, 7));
    printf("event %d\n", next_event(context));
    printf("receive status %d\n", next_completion(end.cq).status);
    print("alloc_pd", allocate(context));
    print("query_device", ibv_query_device(context, &attributes));
    if (!strcmp(mode, "lose-and-end"))
        return;
    if (has_another) {
        /* The fault that lets the device return waits for the shared receive queue. */
        struct ibv_srq_init_attr init = {.attr = {.max_wr = 1, .max_sge = 1}};
        check(count_devices() == 1, "one device");
        check(!ibv_open_device(device) && errno == ENODEV, "ENODEV");
        while (is_in_sysfs(name))
            usleep(1000);
        struct ibv_context *other = ibv_open_device(list[1]);
        struct ibv_pd *pd = other ? ibv_alloc_pd(other) : NULL;
        check(pd && is_in_sysfs(ibv_get_device_name(list[1])), "another device");
        check(ibv_create_srq(pd, &init) != NULL, "ibv_create_srq");
    }
    while (!(again = open_named(name)))
        usleep(1000);
    print("alloc_pd", allocate(again));
    print("alloc_pd", allocate(context));
    while (has_another && !is_in_sysfs(name))
        usleep(1000);
}

int main(int count, char **arguments)
{
    const char *mode = count > 1 ? arguments[1] : "completions";
    if (!strcmp(mode, "resolve"))
        resolve_twice();
    else if (!strncmp(mode, "cards", 5))
        send_between_cards(!strcmp(mode, "cards-hang"));
    else if (!strcmp(mode, "release"))
        release();
    else if (!strcmp(mode, "wait"))
        wait_for_event(atoi(arguments[2]));
    else if (!strncmp(mode, "lose", 4))
        lose_device(mode);
    else
        complete_and_notify();
    return 0;
}
