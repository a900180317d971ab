/* Prints the first device, and runs long enough for its libraries to be seen. */
#include <infiniband/verbs.h>
#include <stdio.h>
#include <unistd.h>

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	puts(list && list[0] ? ibv_get_device_name(list[0]) : "no device");
	usleep(500000);
	return 0;
}
