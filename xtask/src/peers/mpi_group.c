// Barriers and messages of MPI between two processes on two cores, measured as `crosstie bench barrier` and `bench message` do.
//
//   mpirun -n 2 mpi_group BYTES SECONDS CORE0 CORE1
//
// Rank 1 sends messages of BYTES bytes to rank 0, numbered; rank 0 checks the numbers. Slices of about 25 ms alternate between barriers
// and messages. Prints one JSON object.

#define _GNU_SOURCE
#include <mpi.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SLICE 0.025
#define SAMPLES 4000000

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, long count) {
    qsort(values, (size_t)count, sizeof *values, compare_doubles);
    return count == 0 ? 0 : values[count / 2];
}

// As many operations as fit into a slice.
static long next_count(long count, double elapsed) {
    double wanted = (double)count * SLICE / (elapsed > 1e-6 ? elapsed : 1e-6);
    if (wanted < (double)count / 4) wanted = (double)count / 4;
    if (wanted > (double)count * 4) wanted = (double)count * 4;
    return wanted < 8 ? 8 : (long)wanted;
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    int rank, size;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    if (argc != 5 || size != 2) {
        fprintf(stderr, "usage: mpirun -n 2 mpi_group BYTES SECONDS CORE0 CORE1\n");
        return 2;
    }
    int bytes = atoi(argv[1]);
    double seconds = atof(argv[2]);
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(atoi(argv[3 + rank]), &cores);
    if (bytes < 8 || sched_setaffinity(0, sizeof cores, &cores) != 0) {
        fprintf(stderr, "invalid size or core\n");
        return 2;
    }
    char *buffer = calloc(1, (size_t)bytes);
    double *barriers = malloc(SAMPLES * sizeof *barriers);
    double rates[100000];
    long sampled = 0, slices = 0, barrier_count = 1000, message_count = 1000;
    uint64_t next = 0, errors = 0;
    double begin = MPI_Wtime();
    for (int running = 1; running;) {
        MPI_Bcast(&barrier_count, 1, MPI_LONG, 0, MPI_COMM_WORLD);
        MPI_Bcast(&message_count, 1, MPI_LONG, 0, MPI_COMM_WORLD);
        MPI_Barrier(MPI_COMM_WORLD);
        double start = MPI_Wtime(), last = start;
        for (long i = 0; i < barrier_count; i++) {
            MPI_Barrier(MPI_COMM_WORLD);
            double now = MPI_Wtime();
            if (sampled < SAMPLES) barriers[sampled++] = now - last;
            last = now;
        }
        barrier_count = next_count(barrier_count, last - start);
        MPI_Barrier(MPI_COMM_WORLD);
        start = MPI_Wtime();
        for (long i = 0; i < message_count; i++, next++) {
            if (rank == 1) {
                memcpy(buffer, &next, sizeof next);
                MPI_Send(buffer, bytes, MPI_BYTE, 0, 1, MPI_COMM_WORLD);
            } else {
                MPI_Status status;
                int count;
                MPI_Recv(buffer, bytes, MPI_BYTE, 1, 1, MPI_COMM_WORLD, &status);
                MPI_Get_count(&status, MPI_BYTE, &count);
                errors += count != bytes || memcmp(buffer, &next, sizeof next) != 0;
            }
        }
        double elapsed = MPI_Wtime() - start;
        // The first slices find out how many operations fit.
        if (slices < 100000) rates[slices++] = (double)message_count / elapsed;
        message_count = next_count(message_count, elapsed);
        running = MPI_Wtime() - begin < seconds;
        MPI_Bcast(&running, 1, MPI_INT, 0, MPI_COMM_WORLD);
    }
    if (rank == 0) {
        printf("{\"barrier_p50_ns\": %.1f, \"messages_per_s\": %.0f, \"errors\": %llu}\n", median(barriers, sampled) * 1e9,
               median(rates, slices), (unsigned long long)errors);
    }
    MPI_Finalize();
    return 0;
}
