/* NVIDIA's driver for a machine without one: refuses what a GPU of compute capability 9.0 would
 * refuse (CUDA Driver API: cuLaunchKernelEx, cuTensorMapEncodeTiled), and computes nothing.
 *
 * Triton 3.6 to 3.9 resolve these names; anything else one asks for fails to link, and is heard of.
 * DRY_RUN_SHARED_BYTES: shared memory of a block, if not an H100's.
 */
#include <cuda.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define ACCEPTED(name, ...) \
    CUresult name(__VA_ARGS__) { return CUDA_SUCCESS; }

static char reason[256] = "no reason given";
static long launched, early, encoded;

/* For the dry run itself. */
long dry_run_launches(void) { return launched; }
long dry_run_early(void) { return early; }
long dry_run_descriptors(void) { return encoded; }

static CUresult refuse(const char *format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(reason, sizeof reason, format, values);
    va_end(values);
    return CUDA_ERROR_INVALID_VALUE;
}

static unsigned shared_bytes(void) {
    const char *given = getenv("DRY_RUN_SHARED_BYTES");
    return given ? (unsigned)strtoul(given, NULL, 10) : 227u * 1024u;
}

ACCEPTED(cuInit, unsigned flags)
ACCEPTED(cuCtxSetCurrent, CUcontext context)
ACCEPTED(cuFuncSetCacheConfig, CUfunction function, CUfunc_cache config)
ACCEPTED(cuFuncSetAttribute, CUfunction function, CUfunction_attribute attribute, int value)
ACCEPTED(cuCtxSetLimit, CUlimit limit, size_t value)
ACCEPTED(cuModuleUnload, CUmodule module)

CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = reason;
    return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *version) {
    *version = CUDA_VERSION;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int index) {
    *device = index;
    return index == 0 ? CUDA_SUCCESS : refuse("there is no device %d", index);
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
        *value = (int)shared_bytes();
        break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
        *value = 65536;
        break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
        *value = 132;
        break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
        *value = 32;
        break;
    default: /* clock rates and bus widths, which nothing here goes by */
        *value = 1;
    }
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    static int a_context;
    *context = (CUcontext)&a_context;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) {
    *device = 0;
    return CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
    *status = CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    return cuCtxGetCurrent(context);
}

CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
    *value = 1 << 20;
    return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    *module = (CUmodule)image;
    return image ? CUDA_SUCCESS : refuse("a module without an image");
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    *function = (CUfunction)module;
    return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
    return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *config) {
    *count = 132;
    return CUDA_SUCCESS;
}

/* What is passed for a pointer is one already: every tensor is the GPU's. */
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
    *(CUdeviceptr *)value = pointer;
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments,
                          void **extra) {
    unsigned threads = config->blockDimX * config->blockDimY * config->blockDimZ;
    unsigned x = config->gridDimX, y = config->gridDimY, z = config->gridDimZ;
    if (!function || !arguments)
        return refuse("a launch without a function or arguments");
    if (x < 1 || x > INT32_MAX || y < 1 || y > 65535 || z < 1 || z > 65535)
        return refuse("a grid of %u x %u x %u programs", x, y, z);
    if (threads < 1 || threads > 1024)
        return refuse("%u threads in a block", threads);
    if (config->sharedMemBytes > shared_bytes())
        return refuse("%u bytes of shared memory, of %u", config->sharedMemBytes, shared_bytes());
    for (unsigned i = 0; i < config->numAttrs; i++)
        if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
            early += config->attrs[i].value.programmaticStreamSerializationAllowed != 0;
    launched++;
    return CUDA_SUCCESS;
}

/* By the numbers of CUtensorMapDataType. */
static const unsigned element_bytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank,
                                void *address, const cuuint64_t *sizes, const cuuint64_t *strides,
                                const cuuint32_t *box, const cuuint32_t *steps,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
    static const unsigned spans[] = {0, 32, 64, 128}; /* bytes, by CUtensorMapSwizzle */
    if (type >= sizeof element_bytes / sizeof *element_bytes || rank < 1 || rank > 5)
        return refuse("a descriptor of type %d and rank %u", (int)type, rank);
    if (!address || (uintptr_t)address % 16)
        return refuse("a descriptor's address %p is no multiple of 16", address);
    for (unsigned i = 0; i < rank; i++) {
        if (sizes[i] < 1 || sizes[i] > UINT64_C(1) << 32)
            return refuse("a descriptor's size %u is %llu", i, (unsigned long long)sizes[i]);
        if (box[i] < 1 || box[i] > 256)
            return refuse("a descriptor's box %u is %u", i, box[i]);
        if (steps[i] < 1 || steps[i] > 8)
            return refuse("a descriptor's element stride %u is %u", i, steps[i]);
    }
    for (unsigned i = 0; i + 1 < rank; i++)
        if (!strides[i] || strides[i] % 16 || strides[i] >= UINT64_C(1) << 40)
            return refuse("a descriptor's stride %u is %llu bytes", i,
                          (unsigned long long)strides[i]);
    unsigned inner = box[0] * element_bytes[type];
    if (inner % 16)
        return refuse("a descriptor's rows are of %u bytes", inner);
    if (swizzle && (swizzle > 3 || inner > spans[swizzle]))
        return refuse("a descriptor's rows of %u bytes under swizzle %d", inner, (int)swizzle);
    encoded++;
    return CUDA_SUCCESS;
}
