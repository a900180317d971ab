/* A program whose error handling is wrong on purpose, for tests of sweeps: it waits for ever if the query of the device
 * fails, and crashes without a protection domain. It does without a region that it cannot register, unless it has none. */
#include <infiniband/verbs.h>
#include <stdio.h>
#include <unistd.h>

#define REGIONS 4

static char memory[REGIONS][64];

int main(void)
{
    struct ibv_device **list = ibv_get_device_list(NULL);
    struct ibv_context *context = list && list[0] ? ibv_open_device(list[0]) : NULL;
    struct ibv_device_attr attributes;
    if (!context)
        return 2;
    if (ibv_query_device(context, &attributes))
        pause();
    struct ibv_pd *pd = ibv_alloc_pd(context);
    volatile unsigned handle = pd->handle;
    (void)handle;
    struct ibv_mr *regions[REGIONS];
    int registered = 0;
    for (int i = 0; i < REGIONS; i++)
        registered += (regions[i] = ibv_reg_mr(pd, memory[i], sizeof memory[i], IBV_ACCESS_LOCAL_WRITE)) != NULL;
    for (int i = 0; i < REGIONS; i++)
        if (regions[i])
            ibv_dereg_mr(regions[i]);
    ibv_dealloc_pd(pd);
    ibv_close_device(context);
    ibv_free_device_list(list);
    puts("done");
    return registered ? 0 : 1;
}
