/* libcuda.so.1 for machines without a driver: every call answers CUDA_ERROR_NO_DEVICE.
 *
 * Enough for libraries that link the driver to load, and for the first real call to fail as it does
 * where there is no GPU. The functions are those that vLLM 0.26, LMCache 0.5.3 and what they carry
 * name as undefined (nm -D), and cuInit, which libcudart asks for. No parameters are declared: the
 * callers' registers are left alone.
 */
#define NO_DEVICE 100
#define ANSWERS_NO_DEVICE(name) \
    int name() { return NO_DEVICE; }

ANSWERS_NO_DEVICE(cuInit)
ANSWERS_NO_DEVICE(cuCtxGetCurrent)
ANSWERS_NO_DEVICE(cuCtxSetCurrent)
ANSWERS_NO_DEVICE(cuDeviceGetAttribute)
ANSWERS_NO_DEVICE(cuDevicePrimaryCtxRetain)
ANSWERS_NO_DEVICE(cuGetErrorString)
ANSWERS_NO_DEVICE(cuGetProcAddress_v2)
ANSWERS_NO_DEVICE(cuMemAddressFree)
ANSWERS_NO_DEVICE(cuMemAddressReserve)
ANSWERS_NO_DEVICE(cuMemCreate)
ANSWERS_NO_DEVICE(cuMemGetAllocationGranularity)
ANSWERS_NO_DEVICE(cuMemMap)
ANSWERS_NO_DEVICE(cuMemRelease)
ANSWERS_NO_DEVICE(cuMemSetAccess)
ANSWERS_NO_DEVICE(cuMemUnmap)
ANSWERS_NO_DEVICE(cuPointerGetAttribute)
ANSWERS_NO_DEVICE(cuTensorMapEncodeTiled)
