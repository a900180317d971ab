#include "objects.h"

static char buffer[4096];

void tear_down(struct objects *o)
{
    if (o->qp)
        ibv_destroy_qp(o->qp);
    if (o->mr)
        ibv_dereg_mr(o->mr);
    if (o->cq)
        ibv_destroy_cq(o->cq);
    if (o->pd)
        ibv_dealloc_pd(o->pd);
    if (o->context)
        ibv_close_device(o->context);
    memset(o, 0, sizeof *o);
}

static int fail(struct objects *o, const char *call)
{
    perror(call);
    tear_down(o);
    return -1;
}

int set_up(struct objects *o)
{
    memset(o, 0, sizeof *o);
    struct ibv_device **list = ibv_get_device_list(NULL);
    if (!list)
        return fail(o, "ibv_get_device_list");
    if (list[0])
        o->context = ibv_open_device(list[0]);
    ibv_free_device_list(list);
    if (!o->context)
        return fail(o, "ibv_open_device");
    o->pd = ibv_alloc_pd(o->context);
    if (!o->pd)
        return fail(o, "ibv_alloc_pd");
    o->cq = ibv_create_cq(o->context, 16, NULL, NULL, 0);
    if (!o->cq)
        return fail(o, "ibv_create_cq");
    o->mr = ibv_reg_mr(o->pd, buffer, sizeof buffer, IBV_ACCESS_LOCAL_WRITE);
    if (!o->mr)
        return fail(o, "ibv_reg_mr");
    struct ibv_qp_init_attr init = {.send_cq = o->cq,
                                    .recv_cq = o->cq,
                                    .cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1},
                                    .qp_type = IBV_QPT_RC};
    o->qp = ibv_create_qp(o->pd, &init);
    if (!o->qp)
        return fail(o, "ibv_create_qp");
    return 0;
}
