/* Messages of several sizes and an all-reduce, with their contents checked, then the throughput of 1 MiB messages. */
#include <mpi.h>
#include <stdio.h>
#include <string.h>

enum { LONGEST = 1 << 20, ROUNDS = 50, NUMBERS = 100000 };

static char buffer[LONGEST];
static double own[NUMBERS], sum[NUMBERS];

int main(int argc, char **argv) {
    int rank, size;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    for (int length = 1; length <= LONGEST; length *= 32) {
        if (rank == 0) {
            memset(buffer, length % 251, length);
            MPI_Send(buffer, length, MPI_CHAR, 1, 7, MPI_COMM_WORLD);
        } else if (rank == 1) {
            MPI_Recv(buffer, length, MPI_CHAR, 0, 7, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
            for (int i = 0; i < length; i++)
                if (buffer[i] != (char)(length % 251)) MPI_Abort(MPI_COMM_WORLD, 3);
        }
    }
    for (int i = 0; i < NUMBERS; i++) own[i] = rank + i;
    MPI_Allreduce(own, sum, NUMBERS, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    for (int i = 0; i < NUMBERS; i++)
        if (sum[i] != size * (double)i + size * (size - 1) / 2) MPI_Abort(MPI_COMM_WORLD, 4);
    MPI_Barrier(MPI_COMM_WORLD);
    double start = MPI_Wtime();
    for (int i = 0; i < ROUNDS; i++) {
        if (rank == 0) MPI_Send(buffer, LONGEST, MPI_CHAR, 1, 8, MPI_COMM_WORLD);
        if (rank == 1) MPI_Recv(buffer, LONGEST, MPI_CHAR, 0, 8, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 0) printf("checked %.0f MB/s\n", ROUNDS * (LONGEST / 1e6) / (MPI_Wtime() - start));
    MPI_Finalize();
    return 0;
}
