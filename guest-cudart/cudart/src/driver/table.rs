//! The driver functions that the runtime uses, with the signatures of CUDA 13.0's cuda.h (enumerations as
//! plain integers).

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::atomic::AtomicBool;

use super::{DefaultStream, driver_table, missing};
use crate::error::{Result, from_driver};
use crate::types::{
    CUDA_ARRAY_MEMORY_REQUIREMENTS, CUDA_ARRAY_SPARSE_PROPERTIES, CUDA_ARRAY3D_DESCRIPTOR,
    CUDA_EXT_SEM_SIGNAL_NODE_PARAMS, CUDA_EXT_SEM_WAIT_NODE_PARAMS, CUDA_EXTERNAL_MEMORY_BUFFER_DESC,
    CUDA_EXTERNAL_MEMORY_HANDLE_DESC, CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC,
    CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC, CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS,
    CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS, CUDA_GRAPH_INSTANTIATE_PARAMS, CUDA_HOST_NODE_PARAMS,
    CUDA_KERNEL_NODE_PARAMS, CUDA_LAUNCH_PARAMS, CUDA_MEM_ALLOC_NODE_PARAMS, CUDA_MEMCPY3D,
    CUDA_MEMCPY3D_BATCH_OP, CUDA_MEMCPY3D_PEER, CUDA_MEMSET_NODE_PARAMS, CUDA_RESOURCE_DESC,
    CUDA_RESOURCE_VIEW_DESC, CUDA_TEXTURE_DESC, CUarray, CUasyncCallback, CUasyncCallbackHandle, CUcontext,
    CUdevice, CUdeviceptr, CUevent, CUexternalMemory, CUexternalSemaphore, CUfunction, CUgraph,
    CUgraphEdgeData, CUgraphExec, CUgraphExecUpdateResultInfo, CUgraphNode, CUgraphNodeParams,
    CUgraphicsResource, CUhostFn, CUipcEventHandle, CUipcMemHandle, CUkernel, CUlaunchAttributeValue,
    CUlaunchConfig, CUlibrary, CUlogsCallback, CUlogsCallbackHandle, CUmemAccessDesc, CUmemLocation,
    CUmemPoolProps, CUmemPoolPtrExportData, CUmemcpyAttributes, CUmemoryPool, CUmipmappedArray, CUstream,
    CUstreamCallback, CUuserObject, CUuuid,
};

driver_table! {
    plain {
        cuArray3DCreate_v2(p_handle: *mut CUarray, p_allocate_array: *const CUDA_ARRAY3D_DESCRIPTOR);
        cuArray3DGetDescriptor_v2(p_array_descriptor: *mut CUDA_ARRAY3D_DESCRIPTOR, h_array: CUarray);
        cuArrayDestroy(h_array: CUarray);
        cuArrayGetMemoryRequirements(memory_requirements: *mut CUDA_ARRAY_MEMORY_REQUIREMENTS, array: CUarray,
            device: CUdevice);
        cuArrayGetPlane(p_plane_array: *mut CUarray, h_array: CUarray, plane_idx: c_uint);
        cuArrayGetSparseProperties(sparse_properties: *mut CUDA_ARRAY_SPARSE_PROPERTIES, array: CUarray);
        cuCtxDisablePeerAccess(peer_context: CUcontext);
        cuCtxEnablePeerAccess(peer_context: CUcontext, flags: c_uint);
        cuCtxGetCacheConfig(pconfig: *mut c_uint);
        cuCtxGetCurrent(pctx: *mut CUcontext);
        cuCtxGetDevice(device: *mut CUdevice);
        cuCtxGetFlags(flags: *mut c_uint);
        cuCtxGetLimit(pvalue: *mut usize, limit: c_uint);
        cuCtxGetSharedMemConfig(p_config: *mut c_uint);
        cuCtxGetStreamPriorityRange(least_priority: *mut c_int, greatest_priority: *mut c_int);
        cuCtxResetPersistingL2Cache();
        cuCtxSetCacheConfig(config: c_uint);
        cuCtxSetCurrent(ctx: CUcontext);
        cuCtxSetLimit(limit: c_uint, value: usize);
        cuCtxSetSharedMemConfig(config: c_uint);
        cuCtxSynchronize();
        cuDestroyExternalMemory(ext_mem: CUexternalMemory);
        cuDestroyExternalSemaphore(ext_sem: CUexternalSemaphore);
        cuDeviceCanAccessPeer(can_access_peer: *mut c_int, dev: CUdevice, peer_dev: CUdevice);
        cuDeviceGet(device: *mut CUdevice, ordinal: c_int);
        cuDeviceGetAttribute(pi: *mut c_int, attrib: c_uint, dev: CUdevice);
        cuDeviceGetByPCIBusId(dev: *mut CUdevice, pci_bus_id: *const c_char);
        cuDeviceGetCount(count: *mut c_int);
        cuDeviceGetDefaultMemPool(pool_out: *mut CUmemoryPool, dev: CUdevice);
        cuDeviceGetGraphMemAttribute(device: CUdevice, attr: c_uint, value: *mut c_void);
        cuDeviceGetHostAtomicCapabilities(capabilities: *mut c_uint, operations: *const c_uint, count: c_uint,
            dev: CUdevice);
        cuDeviceGetMemPool(pool: *mut CUmemoryPool, dev: CUdevice);
        cuDeviceGetName(name: *mut c_char, len: c_int, dev: CUdevice);
        cuDeviceGetNvSciSyncAttributes(nv_sci_sync_attr_list: *mut c_void, dev: CUdevice, flags: c_int);
        cuDeviceGetP2PAtomicCapabilities(capabilities: *mut c_uint, operations: *const c_uint, count: c_uint,
            src_device: CUdevice, dst_device: CUdevice);
        cuDeviceGetP2PAttribute(value: *mut c_int, attrib: c_uint, src_device: CUdevice, dst_device: CUdevice);
        cuDeviceGetPCIBusId(pci_bus_id: *mut c_char, len: c_int, dev: CUdevice);
        cuDeviceGetTexture1DLinearMaxWidth(max_width_in_elements: *mut usize, format: c_uint, num_channels: c_uint,
            dev: CUdevice);
        cuDeviceGetUuid_v2(uuid: *mut CUuuid, dev: CUdevice);
        cuDeviceGraphMemTrim(device: CUdevice);
        cuDevicePrimaryCtxGetState(dev: CUdevice, flags: *mut c_uint, active: *mut c_int);
        cuDevicePrimaryCtxRelease_v2(dev: CUdevice);
        cuDevicePrimaryCtxReset_v2(dev: CUdevice);
        cuDevicePrimaryCtxRetain(pctx: *mut CUcontext, dev: CUdevice);
        cuDevicePrimaryCtxSetFlags_v2(dev: CUdevice, flags: c_uint);
        cuDeviceRegisterAsyncNotification(device: CUdevice, callback_func: CUasyncCallback, user_data: *mut c_void,
            callback: *mut CUasyncCallbackHandle);
        cuDeviceSetGraphMemAttribute(device: CUdevice, attr: c_uint, value: *mut c_void);
        cuDeviceSetMemPool(dev: CUdevice, pool: CUmemoryPool);
        cuDeviceTotalMem_v2(bytes: *mut usize, dev: CUdevice);
        cuDeviceUnregisterAsyncNotification(device: CUdevice, callback: CUasyncCallbackHandle);
        cuDriverGetVersion(driver_version: *mut c_int);
        cuEventCreate(ph_event: *mut CUevent, flags: c_uint);
        cuEventDestroy_v2(h_event: CUevent);
        cuEventElapsedTime_v2(p_milliseconds: *mut f32, h_start: CUevent, h_end: CUevent);
        cuEventQuery(h_event: CUevent);
        cuEventSynchronize(h_event: CUevent);
        cuExternalMemoryGetMappedBuffer(dev_ptr: *mut CUdeviceptr, ext_mem: CUexternalMemory,
            buffer_desc: *const CUDA_EXTERNAL_MEMORY_BUFFER_DESC);
        cuExternalMemoryGetMappedMipmappedArray(mipmap: *mut CUmipmappedArray, ext_mem: CUexternalMemory,
            mipmap_desc: *const CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC);
        cuFlushGPUDirectRDMAWrites(target: c_uint, scope: c_uint);
        cuFuncSetSharedMemConfig(hfunc: CUfunction, config: c_uint);
        cuGetExportTable(pp_export_table: *mut *const c_void, p_export_table_id: *const CUuuid);
        cuGetProcAddress_v2(symbol: *const c_char, pfn: *mut *mut c_void, cuda_version: c_int, flags: u64,
            symbol_status: *mut c_uint);
        cuGraphAddChildGraphNode(ph_graph_node: *mut CUgraphNode, h_graph: CUgraph, dependencies: *const CUgraphNode,
            num_dependencies: usize, child_graph: CUgraph);
        cuGraphAddDependencies_v2(h_graph: CUgraph, from: *const CUgraphNode, to: *const CUgraphNode,
            edge_data: *const CUgraphEdgeData, num_dependencies: usize);
        cuGraphAddEmptyNode(ph_graph_node: *mut CUgraphNode, h_graph: CUgraph, dependencies: *const CUgraphNode,
            num_dependencies: usize);
        cuGraphAddEventRecordNode(ph_graph_node: *mut CUgraphNode, h_graph: CUgraph,
            dependencies: *const CUgraphNode, num_dependencies: usize, event: CUevent);
        cuGraphAddEventWaitNode(ph_graph_node: *mut CUgraphNode, h_graph: CUgraph, dependencies: *const CUgraphNode,
            num_dependencies: usize, event: CUevent);
        cuGraphAddExternalSemaphoresSignalNode(ph_graph_node: *mut CUgraphNode, h_graph: CUgraph,
            dependencies: *const CUgraphNode, num_dependencies: usize,
            node_params: *const CUDA_EXT_SEM_SIGNAL_NODE_PARAMS);
        cuGraphAddExternalSemaphoresWaitNode(ph_graph_node: *mut CUgraphNode, h_graph: CUgraph,
            dependencies: *const CUgraphNode, num_dependencies: usize,
            node_params: *const CUDA_EXT_SEM_WAIT_NODE_PARAMS);
        cuGraphAddHostNode(ph_graph_node: *mut CUgraphNode, h_graph: CUgraph, dependencies: *const CUgraphNode,
            num_dependencies: usize, node_params: *const CUDA_HOST_NODE_PARAMS);
        cuGraphAddKernelNode_v2(ph_graph_node: *mut CUgraphNode, h_graph: CUgraph, dependencies: *const CUgraphNode,
            num_dependencies: usize, node_params: *const CUDA_KERNEL_NODE_PARAMS);
        cuGraphAddMemAllocNode(ph_graph_node: *mut CUgraphNode, h_graph: CUgraph, dependencies: *const CUgraphNode,
            num_dependencies: usize, node_params: *mut CUDA_MEM_ALLOC_NODE_PARAMS);
        cuGraphAddMemFreeNode(ph_graph_node: *mut CUgraphNode, h_graph: CUgraph, dependencies: *const CUgraphNode,
            num_dependencies: usize, dptr: CUdeviceptr);
        cuGraphAddMemcpyNode(ph_graph_node: *mut CUgraphNode, h_graph: CUgraph, dependencies: *const CUgraphNode,
            num_dependencies: usize, copy_params: *const CUDA_MEMCPY3D, ctx: CUcontext);
        cuGraphAddMemsetNode(ph_graph_node: *mut CUgraphNode, h_graph: CUgraph, dependencies: *const CUgraphNode,
            num_dependencies: usize, memset_params: *const CUDA_MEMSET_NODE_PARAMS, ctx: CUcontext);
        cuGraphAddNode_v2(ph_graph_node: *mut CUgraphNode, h_graph: CUgraph, dependencies: *const CUgraphNode,
            dependency_data: *const CUgraphEdgeData, num_dependencies: usize, node_params: *mut CUgraphNodeParams);
        cuGraphChildGraphNodeGetGraph(h_node: CUgraphNode, ph_graph: *mut CUgraph);
        cuGraphClone(ph_graph_clone: *mut CUgraph, original_graph: CUgraph);
        cuGraphConditionalHandleCreate(p_handle_out: *mut u64, h_graph: CUgraph, ctx: CUcontext,
            default_launch_value: c_uint, flags: c_uint);
        cuGraphCreate(ph_graph: *mut CUgraph, flags: c_uint);
        cuGraphDebugDotPrint(h_graph: CUgraph, path: *const c_char, flags: c_uint);
        cuGraphDestroy(h_graph: CUgraph);
        cuGraphDestroyNode(h_node: CUgraphNode);
        cuGraphEventRecordNodeGetEvent(h_node: CUgraphNode, event_out: *mut CUevent);
        cuGraphEventRecordNodeSetEvent(h_node: CUgraphNode, event: CUevent);
        cuGraphEventWaitNodeGetEvent(h_node: CUgraphNode, event_out: *mut CUevent);
        cuGraphEventWaitNodeSetEvent(h_node: CUgraphNode, event: CUevent);
        cuGraphExecChildGraphNodeSetParams(h_graph_exec: CUgraphExec, h_node: CUgraphNode, child_graph: CUgraph);
        cuGraphExecDestroy(h_graph_exec: CUgraphExec);
        cuGraphExecEventRecordNodeSetEvent(h_graph_exec: CUgraphExec, h_node: CUgraphNode, event: CUevent);
        cuGraphExecEventWaitNodeSetEvent(h_graph_exec: CUgraphExec, h_node: CUgraphNode, event: CUevent);
        cuGraphExecExternalSemaphoresSignalNodeSetParams(h_graph_exec: CUgraphExec, h_node: CUgraphNode,
            node_params: *const CUDA_EXT_SEM_SIGNAL_NODE_PARAMS);
        cuGraphExecExternalSemaphoresWaitNodeSetParams(h_graph_exec: CUgraphExec, h_node: CUgraphNode,
            node_params: *const CUDA_EXT_SEM_WAIT_NODE_PARAMS);
        cuGraphExecGetFlags(h_graph_exec: CUgraphExec, flags: *mut u64);
        cuGraphExecHostNodeSetParams(h_graph_exec: CUgraphExec, h_node: CUgraphNode,
            node_params: *const CUDA_HOST_NODE_PARAMS);
        cuGraphExecKernelNodeSetParams_v2(h_graph_exec: CUgraphExec, h_node: CUgraphNode,
            node_params: *const CUDA_KERNEL_NODE_PARAMS);
        cuGraphExecMemcpyNodeSetParams(h_graph_exec: CUgraphExec, h_node: CUgraphNode,
            copy_params: *const CUDA_MEMCPY3D, ctx: CUcontext);
        cuGraphExecMemsetNodeSetParams(h_graph_exec: CUgraphExec, h_node: CUgraphNode,
            memset_params: *const CUDA_MEMSET_NODE_PARAMS, ctx: CUcontext);
        cuGraphExecNodeSetParams(h_graph_exec: CUgraphExec, h_node: CUgraphNode, node_params: *mut CUgraphNodeParams);
        cuGraphExecUpdate_v2(h_graph_exec: CUgraphExec, h_graph: CUgraph,
            result_info: *mut CUgraphExecUpdateResultInfo);
        cuGraphExternalSemaphoresSignalNodeGetParams(h_node: CUgraphNode,
            params_out: *mut CUDA_EXT_SEM_SIGNAL_NODE_PARAMS);
        cuGraphExternalSemaphoresSignalNodeSetParams(h_node: CUgraphNode,
            node_params: *const CUDA_EXT_SEM_SIGNAL_NODE_PARAMS);
        cuGraphExternalSemaphoresWaitNodeGetParams(h_node: CUgraphNode,
            params_out: *mut CUDA_EXT_SEM_WAIT_NODE_PARAMS);
        cuGraphExternalSemaphoresWaitNodeSetParams(h_node: CUgraphNode,
            node_params: *const CUDA_EXT_SEM_WAIT_NODE_PARAMS);
        cuGraphGetEdges_v2(h_graph: CUgraph, from: *mut CUgraphNode, to: *mut CUgraphNode,
            edge_data: *mut CUgraphEdgeData, num_edges: *mut usize);
        cuGraphGetNodes(h_graph: CUgraph, nodes: *mut CUgraphNode, num_nodes: *mut usize);
        cuGraphGetRootNodes(h_graph: CUgraph, root_nodes: *mut CUgraphNode, num_root_nodes: *mut usize);
        cuGraphHostNodeGetParams(h_node: CUgraphNode, node_params: *mut CUDA_HOST_NODE_PARAMS);
        cuGraphHostNodeSetParams(h_node: CUgraphNode, node_params: *const CUDA_HOST_NODE_PARAMS);
        cuGraphInstantiateWithFlags(ph_graph_exec: *mut CUgraphExec, h_graph: CUgraph, flags: u64);
        cuGraphKernelNodeCopyAttributes(dst: CUgraphNode, src: CUgraphNode);
        cuGraphKernelNodeGetAttribute(h_node: CUgraphNode, attr: c_uint, value_out: *mut CUlaunchAttributeValue);
        cuGraphKernelNodeGetParams_v2(h_node: CUgraphNode, node_params: *mut CUDA_KERNEL_NODE_PARAMS);
        cuGraphKernelNodeSetAttribute(h_node: CUgraphNode, attr: c_uint, value: *const CUlaunchAttributeValue);
        cuGraphKernelNodeSetParams_v2(h_node: CUgraphNode, node_params: *const CUDA_KERNEL_NODE_PARAMS);
        cuGraphMemAllocNodeGetParams(h_node: CUgraphNode, params_out: *mut CUDA_MEM_ALLOC_NODE_PARAMS);
        cuGraphMemFreeNodeGetParams(h_node: CUgraphNode, dptr_out: *mut CUdeviceptr);
        cuGraphMemcpyNodeGetParams(h_node: CUgraphNode, node_params: *mut CUDA_MEMCPY3D);
        cuGraphMemcpyNodeSetParams(h_node: CUgraphNode, node_params: *const CUDA_MEMCPY3D);
        cuGraphMemsetNodeGetParams(h_node: CUgraphNode, node_params: *mut CUDA_MEMSET_NODE_PARAMS);
        cuGraphMemsetNodeSetParams(h_node: CUgraphNode, node_params: *const CUDA_MEMSET_NODE_PARAMS);
        cuGraphNodeFindInClone(ph_node: *mut CUgraphNode, h_original_node: CUgraphNode, h_cloned_graph: CUgraph);
        cuGraphNodeGetDependencies_v2(h_node: CUgraphNode, dependencies: *mut CUgraphNode,
            edge_data: *mut CUgraphEdgeData, num_dependencies: *mut usize);
        cuGraphNodeGetDependentNodes_v2(h_node: CUgraphNode, dependent_nodes: *mut CUgraphNode,
            edge_data: *mut CUgraphEdgeData, num_dependent_nodes: *mut usize);
        cuGraphNodeGetEnabled(h_graph_exec: CUgraphExec, h_node: CUgraphNode, is_enabled: *mut c_uint);
        cuGraphNodeGetType(h_node: CUgraphNode, kind: *mut c_uint);
        cuGraphNodeSetEnabled(h_graph_exec: CUgraphExec, h_node: CUgraphNode, is_enabled: c_uint);
        cuGraphNodeSetParams(h_node: CUgraphNode, node_params: *mut CUgraphNodeParams);
        cuGraphReleaseUserObject(graph: CUgraph, object: CUuserObject, count: c_uint);
        cuGraphRemoveDependencies_v2(h_graph: CUgraph, from: *const CUgraphNode, to: *const CUgraphNode,
            edge_data: *const CUgraphEdgeData, num_dependencies: usize);
        cuGraphRetainUserObject(graph: CUgraph, object: CUuserObject, count: c_uint, flags: c_uint);
        cuGraphicsResourceGetMappedMipmappedArray(p_mipmapped_array: *mut CUmipmappedArray,
            resource: CUgraphicsResource);
        cuGraphicsResourceGetMappedPointer_v2(p_dev_ptr: *mut CUdeviceptr, p_size: *mut usize,
            resource: CUgraphicsResource);
        cuGraphicsResourceSetMapFlags_v2(resource: CUgraphicsResource, flags: c_uint);
        cuGraphicsSubResourceGetMappedArray(p_array: *mut CUarray, resource: CUgraphicsResource, array_index: c_uint,
            mip_level: c_uint);
        cuGraphicsUnregisterResource(resource: CUgraphicsResource);
        cuImportExternalMemory(ext_mem_out: *mut CUexternalMemory,
            mem_handle_desc: *const CUDA_EXTERNAL_MEMORY_HANDLE_DESC);
        cuImportExternalSemaphore(ext_sem_out: *mut CUexternalSemaphore,
            sem_handle_desc: *const CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC);
        cuInit(flags: c_uint);
        cuIpcCloseMemHandle(dptr: CUdeviceptr);
        cuIpcGetEventHandle(p_handle: *mut CUipcEventHandle, event: CUevent);
        cuIpcGetMemHandle(p_handle: *mut CUipcMemHandle, dptr: CUdeviceptr);
        cuIpcOpenEventHandle(ph_event: *mut CUevent, handle: CUipcEventHandle);
        cuIpcOpenMemHandle_v2(pdptr: *mut CUdeviceptr, handle: CUipcMemHandle, flags: c_uint);
        cuKernelGetAttribute(pi: *mut c_int, attrib: c_uint, kernel: CUkernel, dev: CUdevice);
        cuKernelGetFunction(p_func: *mut CUfunction, kernel: CUkernel);
        cuKernelGetName(name: *mut *const c_char, hfunc: CUkernel);
        cuKernelGetParamInfo(kernel: CUkernel, param_index: usize, param_offset: *mut usize, param_size: *mut usize);
        cuKernelSetAttribute(attrib: c_uint, val: c_int, kernel: CUkernel, dev: CUdevice);
        cuKernelSetCacheConfig(kernel: CUkernel, config: c_uint, dev: CUdevice);
        cuLaunchCooperativeKernelMultiDevice(launch_params_list: *mut CUDA_LAUNCH_PARAMS, num_devices: c_uint,
            flags: c_uint);
        cuLibraryEnumerateKernels(kernels: *mut CUkernel, num_kernels: c_uint, lib: CUlibrary);
        cuLibraryGetGlobal(dptr: *mut CUdeviceptr, bytes: *mut usize, library: CUlibrary, name: *const c_char);
        cuLibraryGetKernel(p_kernel: *mut CUkernel, library: CUlibrary, name: *const c_char);
        cuLibraryGetKernelCount(count: *mut c_uint, lib: CUlibrary);
        cuLibraryGetManaged(dptr: *mut CUdeviceptr, bytes: *mut usize, library: CUlibrary, name: *const c_char);
        cuLibraryGetUnifiedFunction(fptr: *mut *mut c_void, library: CUlibrary, symbol: *const c_char);
        cuLibraryLoadData(library: *mut CUlibrary, code: *const c_void, jit_options: *mut c_uint,
            jit_options_values: *mut *mut c_void, num_jit_options: c_uint, library_options: *mut c_uint,
            library_option_values: *mut *mut c_void, num_library_options: c_uint);
        cuLibraryLoadFromFile(library: *mut CUlibrary, file_name: *const c_char, jit_options: *mut c_uint,
            jit_options_values: *mut *mut c_void, num_jit_options: c_uint, library_options: *mut c_uint,
            library_option_values: *mut *mut c_void, num_library_options: c_uint);
        cuLibraryUnload(library: CUlibrary);
        cuLogsCurrent(iterator_out: *mut c_uint, flags: c_uint);
        cuLogsDumpToFile(iterator: *mut c_uint, path_to_file: *const c_char, flags: c_uint);
        cuLogsDumpToMemory(iterator: *mut c_uint, buffer: *mut c_char, size: *mut usize, flags: c_uint);
        cuLogsRegisterCallback(callback_func: CUlogsCallback, user_data: *mut c_void,
            callback_out: *mut CUlogsCallbackHandle);
        cuLogsUnregisterCallback(callback: CUlogsCallbackHandle);
        cuMemAdvise_v2(dev_ptr: CUdeviceptr, count: usize, advice: c_uint, location: CUmemLocation);
        cuMemAllocManaged(dptr: *mut CUdeviceptr, bytesize: usize, flags: c_uint);
        cuMemAllocPitch_v2(dptr: *mut CUdeviceptr, p_pitch: *mut usize, width_in_bytes: usize, height: usize,
            element_size_bytes: c_uint);
        cuMemAlloc_v2(dptr: *mut CUdeviceptr, bytesize: usize);
        cuMemFreeHost(p: *mut c_void);
        cuMemFree_v2(dptr: CUdeviceptr);
        cuMemGetDefaultMemPool(pool_out: *mut CUmemoryPool, location: *mut CUmemLocation, kind: c_uint);
        cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
        cuMemGetMemPool(pool: *mut CUmemoryPool, location: *mut CUmemLocation, kind: c_uint);
        cuMemHostAlloc(pp: *mut *mut c_void, bytesize: usize, flags: c_uint);
        cuMemHostGetDevicePointer_v2(pdptr: *mut CUdeviceptr, p: *mut c_void, flags: c_uint);
        cuMemHostGetFlags(p_flags: *mut c_uint, p: *mut c_void);
        cuMemHostRegister_v2(p: *mut c_void, bytesize: usize, flags: c_uint);
        cuMemHostUnregister(p: *mut c_void);
        cuMemPoolCreate(pool: *mut CUmemoryPool, pool_props: *const CUmemPoolProps);
        cuMemPoolDestroy(pool: CUmemoryPool);
        cuMemPoolExportPointer(share_data_out: *mut CUmemPoolPtrExportData, ptr: CUdeviceptr);
        cuMemPoolExportToShareableHandle(handle_out: *mut c_void, pool: CUmemoryPool, handle_type: c_uint,
            flags: u64);
        cuMemPoolGetAccess(flags: *mut c_uint, mem_pool: CUmemoryPool, location: *mut CUmemLocation);
        cuMemPoolGetAttribute(pool: CUmemoryPool, attr: c_uint, value: *mut c_void);
        cuMemPoolImportFromShareableHandle(pool_out: *mut CUmemoryPool, handle: *mut c_void, handle_type: c_uint,
            flags: u64);
        cuMemPoolImportPointer(ptr_out: *mut CUdeviceptr, pool: CUmemoryPool,
            share_data: *mut CUmemPoolPtrExportData);
        cuMemPoolSetAccess(pool: CUmemoryPool, map: *const CUmemAccessDesc, count: usize);
        cuMemPoolSetAttribute(pool: CUmemoryPool, attr: c_uint, value: *mut c_void);
        cuMemPoolTrimTo(pool: CUmemoryPool, min_bytes_to_keep: usize);
        cuMemRangeGetAttribute(data: *mut c_void, data_size: usize, attribute: c_uint, dev_ptr: CUdeviceptr,
            count: usize);
        cuMemRangeGetAttributes(data: *mut *mut c_void, data_sizes: *mut usize, attributes: *mut c_uint,
            num_attributes: usize, dev_ptr: CUdeviceptr, count: usize);
        cuMemSetMemPool(location: *mut CUmemLocation, kind: c_uint, pool: CUmemoryPool);
        cuMipmappedArrayCreate(p_handle: *mut CUmipmappedArray,
            p_mipmapped_array_desc: *const CUDA_ARRAY3D_DESCRIPTOR, num_mipmap_levels: c_uint);
        cuMipmappedArrayDestroy(h_mipmapped_array: CUmipmappedArray);
        cuMipmappedArrayGetLevel(p_level_array: *mut CUarray, h_mipmapped_array: CUmipmappedArray, level: c_uint);
        cuMipmappedArrayGetMemoryRequirements(memory_requirements: *mut CUDA_ARRAY_MEMORY_REQUIREMENTS,
            mipmap: CUmipmappedArray, device: CUdevice);
        cuMipmappedArrayGetSparseProperties(sparse_properties: *mut CUDA_ARRAY_SPARSE_PROPERTIES,
            mipmap: CUmipmappedArray);
        cuOccupancyAvailableDynamicSMemPerBlock(dynamic_smem_size: *mut usize, func: CUfunction, num_blocks: c_int,
            block_size: c_int);
        cuOccupancyMaxActiveBlocksPerMultiprocessor(num_blocks: *mut c_int, func: CUfunction, block_size: c_int,
            dynamic_smem_size: usize);
        cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(num_blocks: *mut c_int, func: CUfunction,
            block_size: c_int, dynamic_smem_size: usize, flags: c_uint);
        cuOccupancyMaxActiveClusters(num_clusters: *mut c_int, func: CUfunction, config: *const CUlaunchConfig);
        cuOccupancyMaxPotentialClusterSize(cluster_size: *mut c_int, func: CUfunction, config: *const CUlaunchConfig);
        cuPointerGetAttributes(num_attributes: c_uint, attributes: *mut c_uint, data: *mut *mut c_void,
            ptr: CUdeviceptr);
        cuProfilerStart();
        cuProfilerStop();
        cuStreamCreate(ph_stream: *mut CUstream, flags: c_uint);
        cuStreamCreateWithPriority(ph_stream: *mut CUstream, flags: c_uint, priority: c_int);
        cuStreamDestroy_v2(h_stream: CUstream);
        cuSurfObjectCreate(p_surf_object: *mut u64, p_res_desc: *const CUDA_RESOURCE_DESC);
        cuSurfObjectDestroy(surf_object: u64);
        cuSurfObjectGetResourceDesc(p_res_desc: *mut CUDA_RESOURCE_DESC, surf_object: u64);
        cuTexObjectCreate(p_tex_object: *mut u64, p_res_desc: *const CUDA_RESOURCE_DESC,
            p_tex_desc: *const CUDA_TEXTURE_DESC, p_res_view_desc: *const CUDA_RESOURCE_VIEW_DESC);
        cuTexObjectDestroy(tex_object: u64);
        cuTexObjectGetResourceDesc(p_res_desc: *mut CUDA_RESOURCE_DESC, tex_object: u64);
        cuTexObjectGetResourceViewDesc(p_res_view_desc: *mut CUDA_RESOURCE_VIEW_DESC, tex_object: u64);
        cuTexObjectGetTextureDesc(p_tex_desc: *mut CUDA_TEXTURE_DESC, tex_object: u64);
        cuThreadExchangeStreamCaptureMode(mode: *mut c_uint);
        cuUserObjectCreate(object_out: *mut CUuserObject, ptr: *mut c_void, destroy: CUhostFn,
            initial_refcount: c_uint, flags: c_uint);
        cuUserObjectRelease(object: CUuserObject, count: c_uint);
        cuUserObjectRetain(object: CUuserObject, count: c_uint);
    }
    streamed {
        cuEventRecord/"cuEventRecord_ptsz"(h_event: CUevent, h_stream: CUstream);
        cuEventRecordWithFlags/"cuEventRecordWithFlags_ptsz"(h_event: CUevent, h_stream: CUstream, flags: c_uint);
        cuGraphInstantiateWithParams/"cuGraphInstantiateWithParams_ptsz"(ph_graph_exec: *mut CUgraphExec,
            h_graph: CUgraph, instantiate_params: *mut CUDA_GRAPH_INSTANTIATE_PARAMS);
        cuGraphLaunch/"cuGraphLaunch_ptsz"(h_graph_exec: CUgraphExec, h_stream: CUstream);
        cuGraphUpload/"cuGraphUpload_ptsz"(h_graph_exec: CUgraphExec, h_stream: CUstream);
        cuGraphicsMapResources/"cuGraphicsMapResources_ptsz"(count: c_uint, resources: *mut CUgraphicsResource,
            h_stream: CUstream);
        cuGraphicsUnmapResources/"cuGraphicsUnmapResources_ptsz"(count: c_uint, resources: *mut CUgraphicsResource,
            h_stream: CUstream);
        cuLaunchCooperativeKernel/"cuLaunchCooperativeKernel_ptsz"(f: CUfunction, grid_dim_x: c_uint,
            grid_dim_y: c_uint, grid_dim_z: c_uint, block_dim_x: c_uint, block_dim_y: c_uint, block_dim_z: c_uint,
            shared_mem_bytes: c_uint, h_stream: CUstream, kernel_params: *mut *mut c_void);
        cuLaunchHostFunc/"cuLaunchHostFunc_ptsz"(h_stream: CUstream, function: CUhostFn, user_data: *mut c_void);
        cuLaunchKernel/"cuLaunchKernel_ptsz"(f: CUfunction, grid_dim_x: c_uint, grid_dim_y: c_uint,
            grid_dim_z: c_uint, block_dim_x: c_uint, block_dim_y: c_uint, block_dim_z: c_uint,
            shared_mem_bytes: c_uint, h_stream: CUstream, kernel_params: *mut *mut c_void, extra: *mut *mut c_void);
        cuLaunchKernelEx/"cuLaunchKernelEx_ptsz"(config: *const CUlaunchConfig, f: CUfunction,
            kernel_params: *mut *mut c_void, extra: *mut *mut c_void);
        cuMemAllocAsync/"cuMemAllocAsync_ptsz"(dptr: *mut CUdeviceptr, bytesize: usize, h_stream: CUstream);
        cuMemAllocFromPoolAsync/"cuMemAllocFromPoolAsync_ptsz"(dptr: *mut CUdeviceptr, bytesize: usize,
            pool: CUmemoryPool, h_stream: CUstream);
        cuMemDiscardAndPrefetchBatchAsync/"cuMemDiscardAndPrefetchBatchAsync_ptsz"(dptrs: *mut CUdeviceptr,
            sizes: *mut usize, count: usize, prefetch_locs: *mut CUmemLocation, prefetch_loc_idxs: *mut usize,
            num_prefetch_locs: usize, flags: u64, h_stream: CUstream);
        cuMemDiscardBatchAsync/"cuMemDiscardBatchAsync_ptsz"(dptrs: *mut CUdeviceptr, sizes: *mut usize,
            count: usize, flags: u64, h_stream: CUstream);
        cuMemFreeAsync/"cuMemFreeAsync_ptsz"(dptr: CUdeviceptr, h_stream: CUstream);
        cuMemPrefetchAsync_v2/"cuMemPrefetchAsync_v2_ptsz"(dev_ptr: CUdeviceptr, count: usize,
            location: CUmemLocation, flags: c_uint, h_stream: CUstream);
        cuMemPrefetchBatchAsync/"cuMemPrefetchBatchAsync_ptsz"(dptrs: *mut CUdeviceptr, sizes: *mut usize,
            count: usize, prefetch_locs: *mut CUmemLocation, prefetch_loc_idxs: *mut usize, num_prefetch_locs: usize,
            flags: u64, h_stream: CUstream);
        cuMemcpy/"cuMemcpy_ptds"(dst: CUdeviceptr, src: CUdeviceptr, byte_count: usize);
        cuMemcpy3DAsync_v2/"cuMemcpy3DAsync_v2_ptsz"(p_copy: *const CUDA_MEMCPY3D, h_stream: CUstream);
        cuMemcpy3DBatchAsync/"cuMemcpy3DBatchAsync_ptsz"(num_ops: usize, op_list: *mut CUDA_MEMCPY3D_BATCH_OP,
            fail_idx: *mut usize, flags: u64, h_stream: CUstream);
        cuMemcpy3DBatchAsync_v2/"cuMemcpy3DBatchAsync_v2_ptsz"(num_ops: usize, op_list: *mut CUDA_MEMCPY3D_BATCH_OP,
            flags: u64, h_stream: CUstream);
        cuMemcpy3DPeer/"cuMemcpy3DPeer_ptds"(p_copy: *const CUDA_MEMCPY3D_PEER);
        cuMemcpy3DPeerAsync/"cuMemcpy3DPeerAsync_ptsz"(p_copy: *const CUDA_MEMCPY3D_PEER, h_stream: CUstream);
        cuMemcpy3D_v2/"cuMemcpy3D_v2_ptds"(p_copy: *const CUDA_MEMCPY3D);
        cuMemcpyAsync/"cuMemcpyAsync_ptsz"(dst: CUdeviceptr, src: CUdeviceptr, byte_count: usize, h_stream: CUstream);
        cuMemcpyBatchAsync/"cuMemcpyBatchAsync_ptsz"(dsts: *mut CUdeviceptr, srcs: *mut CUdeviceptr,
            sizes: *mut usize, count: usize, attrs: *mut CUmemcpyAttributes, attrs_idxs: *mut usize,
            num_attrs: usize, fail_idx: *mut usize, h_stream: CUstream);
        cuMemcpyBatchAsync_v2/"cuMemcpyBatchAsync_v2_ptsz"(dsts: *mut CUdeviceptr, srcs: *mut CUdeviceptr,
            sizes: *mut usize, count: usize, attrs: *mut CUmemcpyAttributes, attrs_idxs: *mut usize,
            num_attrs: usize, h_stream: CUstream);
        cuMemcpyDtoDAsync_v2/"cuMemcpyDtoDAsync_v2_ptsz"(dst_device: CUdeviceptr, src_device: CUdeviceptr,
            byte_count: usize, h_stream: CUstream);
        cuMemcpyDtoD_v2/"cuMemcpyDtoD_v2_ptds"(dst_device: CUdeviceptr, src_device: CUdeviceptr, byte_count: usize);
        cuMemcpyDtoHAsync_v2/"cuMemcpyDtoHAsync_v2_ptsz"(dst_host: *mut c_void, src_device: CUdeviceptr,
            byte_count: usize, h_stream: CUstream);
        cuMemcpyDtoH_v2/"cuMemcpyDtoH_v2_ptds"(dst_host: *mut c_void, src_device: CUdeviceptr, byte_count: usize);
        cuMemcpyHtoDAsync_v2/"cuMemcpyHtoDAsync_v2_ptsz"(dst_device: CUdeviceptr, src_host: *const c_void,
            byte_count: usize, h_stream: CUstream);
        cuMemcpyHtoD_v2/"cuMemcpyHtoD_v2_ptds"(dst_device: CUdeviceptr, src_host: *const c_void, byte_count: usize);
        cuMemcpyPeer/"cuMemcpyPeer_ptds"(dst_device: CUdeviceptr, dst_context: CUcontext, src_device: CUdeviceptr,
            src_context: CUcontext, byte_count: usize);
        cuMemcpyPeerAsync/"cuMemcpyPeerAsync_ptsz"(dst_device: CUdeviceptr, dst_context: CUcontext,
            src_device: CUdeviceptr, src_context: CUcontext, byte_count: usize, h_stream: CUstream);
        cuMemsetD2D8Async/"cuMemsetD2D8Async_ptsz"(dst_device: CUdeviceptr, dst_pitch: usize, uc: u8, width: usize,
            height: usize, h_stream: CUstream);
        cuMemsetD2D8_v2/"cuMemsetD2D8_v2_ptds"(dst_device: CUdeviceptr, dst_pitch: usize, uc: u8, width: usize,
            height: usize);
        cuMemsetD8Async/"cuMemsetD8Async_ptsz"(dst_device: CUdeviceptr, uc: u8, n: usize, h_stream: CUstream);
        cuMemsetD8_v2/"cuMemsetD8_v2_ptds"(dst_device: CUdeviceptr, uc: u8, n: usize);
        cuSignalExternalSemaphoresAsync/"cuSignalExternalSemaphoresAsync_ptsz"(
            ext_sem_array: *const CUexternalSemaphore, params_array: *const CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS,
            num_ext_sems: c_uint, stream: CUstream);
        cuStreamAddCallback/"cuStreamAddCallback_ptsz"(h_stream: CUstream, callback: CUstreamCallback,
            user_data: *mut c_void, flags: c_uint);
        cuStreamAttachMemAsync/"cuStreamAttachMemAsync_ptsz"(h_stream: CUstream, dptr: CUdeviceptr, length: usize,
            flags: c_uint);
        cuStreamBeginCaptureToGraph/"cuStreamBeginCaptureToGraph_ptsz"(h_stream: CUstream, h_graph: CUgraph,
            dependencies: *const CUgraphNode, dependency_data: *const CUgraphEdgeData, num_dependencies: usize,
            mode: c_uint);
        cuStreamBeginCapture_v2/"cuStreamBeginCapture_v2_ptsz"(h_stream: CUstream, mode: c_uint);
        cuStreamCopyAttributes/"cuStreamCopyAttributes_ptsz"(dst: CUstream, src: CUstream);
        cuStreamEndCapture/"cuStreamEndCapture_ptsz"(h_stream: CUstream, ph_graph: *mut CUgraph);
        cuStreamGetAttribute/"cuStreamGetAttribute_ptsz"(h_stream: CUstream, attr: c_uint,
            value_out: *mut CUlaunchAttributeValue);
        cuStreamGetCaptureInfo_v3/"cuStreamGetCaptureInfo_v3_ptsz"(h_stream: CUstream,
            capture_status_out: *mut c_uint, id_out: *mut u64, graph_out: *mut CUgraph,
            dependencies_out: *mut *const CUgraphNode, edge_data_out: *mut *const CUgraphEdgeData,
            num_dependencies_out: *mut usize);
        cuStreamGetDevice/"cuStreamGetDevice_ptsz"(h_stream: CUstream, device: *mut CUdevice);
        cuStreamGetFlags/"cuStreamGetFlags_ptsz"(h_stream: CUstream, flags: *mut c_uint);
        cuStreamGetId/"cuStreamGetId_ptsz"(h_stream: CUstream, stream_id: *mut u64);
        cuStreamGetPriority/"cuStreamGetPriority_ptsz"(h_stream: CUstream, priority: *mut c_int);
        cuStreamIsCapturing/"cuStreamIsCapturing_ptsz"(h_stream: CUstream, capture_status: *mut c_uint);
        cuStreamQuery/"cuStreamQuery_ptsz"(h_stream: CUstream);
        cuStreamSetAttribute/"cuStreamSetAttribute_ptsz"(h_stream: CUstream, attr: c_uint,
            value: *const CUlaunchAttributeValue);
        cuStreamSynchronize/"cuStreamSynchronize_ptsz"(h_stream: CUstream);
        cuStreamUpdateCaptureDependencies_v2/"cuStreamUpdateCaptureDependencies_v2_ptsz"(h_stream: CUstream,
            dependencies: *mut CUgraphNode, dependency_data: *const CUgraphEdgeData, num_dependencies: usize,
            flags: c_uint);
        cuStreamWaitEvent/"cuStreamWaitEvent_ptsz"(h_stream: CUstream, h_event: CUevent, flags: c_uint);
        cuWaitExternalSemaphoresAsync/"cuWaitExternalSemaphoresAsync_ptsz"(ext_sem_array: *const CUexternalSemaphore,
            params_array: *const CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS, num_ext_sems: c_uint, stream: CUstream);
    }
}
