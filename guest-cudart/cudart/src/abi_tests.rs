//! Compares this library with NVIDIA's library of the same version: structure layouts with the headers,
//! exported names and error texts with the library itself. Both are installed from PyPI into
//! `build/cuda-runtime/` (see `nvidia`).

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fmt::Write as _;
use std::fs;
use std::mem::offset_of;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use crate::last_error::{cudaGetErrorName, cudaGetErrorString};
use crate::properties::{self, DeviceProp};
use crate::types::*;

#[path = "../../c_signatures.rs"]
mod c_signatures;

use c_signatures::{Class, bracketed, classes, prototypes, split};

const VERSION: &str = if cfg!(feature = "v12") { "12.8" } else { "13.0" };
const PACKAGE: &str =
    if cfg!(feature = "v12") { "nvidia-cuda-runtime-cu12==12.8.*" } else { "nvidia-cuda-runtime==13.0.*" };
/// The compiler headers that the runtime's headers include. The 13.0 ones serve both versions: the
/// declarations that the runtime needs are the same.
const COMPILER_HEADERS: &str = "nvidia-cuda-crt==13.0.*";

struct Nvidia {
    includes: Vec<PathBuf>,
    library: PathBuf,
}

/// NVIDIA's headers and library of this version, installed on first use.
fn nvidia() -> &'static Nvidia {
    static FOUND: OnceLock<Nvidia> = OnceLock::new();
    FOUND.get_or_init(|| {
        let build = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../build/cuda-runtime");
        let root = build.join(VERSION);
        if !root.exists() {
            fs::create_dir_all(&build).expect("build/ can be written");
            // Install into a temporary folder and rename it, so that a concurrent test run never sees half an
            // installation.
            let fresh = tempfile::tempdir_in(&build).expect("build/cuda-runtime/ can be written");
            let target = fresh.path().join("packages");
            run(Command::new("python3")
                .args(["-m", "pip", "install", "--quiet", "--no-deps", "--root-user-action", "ignore"])
                .args([PACKAGE, COMPILER_HEADERS, "--target"])
                .arg(&target));
            // If another test run renamed its copy first, use that one.
            let _ = fs::rename(&target, &root);
        }
        let mut found = Nvidia { includes: Vec::new(), library: PathBuf::new() };
        search(&root, &mut found);
        found
    })
}

fn search(folder: &Path, found: &mut Nvidia) {
    for entry in fs::read_dir(folder).expect("an installed folder") {
        let path = entry.expect("an entry").path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() {
            if path.join("crt/host_defines.h").exists() || path.join("cuda_runtime_api.h").exists() {
                found.includes.push(path.clone());
            }
            search(&path, found);
        } else if name.starts_with("libcudart.so.") {
            found.library = path;
        }
    }
}

fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}:\n{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("UTF-8")
}

/// Compiles C code that includes both APIs' headers.
fn compile(code: &str) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let source = folder.path().join("layout.c");
    fs::write(
        &source,
        format!("#include <stddef.h>\n#include <cuda.h>\n#include <cuda_runtime_api.h>\n{code}"),
    )
    .expect("a file");
    let mut command = Command::new("gcc");
    command.args(["-fsyntax-only", "-std=c11"]).arg(&source);
    for include in &nvidia().includes {
        command.arg("-I").arg(include);
    }
    run(&mut command);
}

/// Asserts in C that a type has the same size, and its fields the same offsets, as in this library.
macro_rules! same_layout {
    ($code:ident: $($c:literal = $rust:ident { $($c_field:literal = $field:ident),* $(,)? };)*) => {$(
        writeln!($code, "_Static_assert(sizeof({}) == {}, {0:?});", $c, size_of::<$rust>()).unwrap();
        $(writeln!($code, "_Static_assert(offsetof({}, {}) == {}, \"{0} {1}\");", $c, $c_field, offset_of!($rust, $field)).unwrap();)*
    )*};
}

#[test]
fn runtime_structures_match_the_headers() {
    let mut code = String::new();
    same_layout! { code:
        "dim3" = Dim3 { "x" = x, "y" = y, "z" = z };
        "struct cudaExtent" = Extent { "width" = width, "height" = height, "depth" = depth };
        "struct cudaPos" = Pos { "x" = x, "y" = y, "z" = z };
        "struct cudaPitchedPtr" = PitchedPtr { "ptr" = ptr, "pitch" = pitch, "xsize" = xsize, "ysize" = ysize };
        "struct cudaChannelFormatDesc" = ChannelFormatDesc { "x" = x, "y" = y, "z" = z, "w" = w, "f" = f };
        "struct cudaMemcpy3DParms" = Memcpy3DParms {
            "srcArray" = src_array, "srcPos" = src_pos, "srcPtr" = src_ptr, "dstArray" = dst_array, "dstPos" = dst_pos,
            "dstPtr" = dst_ptr, "extent" = extent, "kind" = kind,
        };
        "struct cudaMemcpy3DPeerParms" = Memcpy3DPeerParms {
            "srcArray" = src_array, "srcPos" = src_pos, "srcPtr" = src_ptr, "srcDevice" = src_device, "dstArray" = dst_array,
            "dstPos" = dst_pos, "dstPtr" = dst_ptr, "dstDevice" = dst_device, "extent" = extent,
        };
        "cudaLaunchConfig_t" = LaunchConfig {
            "gridDim" = grid, "blockDim" = block, "dynamicSmemBytes" = dynamic_smem_bytes, "stream" = stream,
            "attrs" = attrs, "numAttrs" = num_attrs,
        };
        "struct cudaKernelNodeParams" = KernelNodeParams {
            "func" = func, "gridDim" = grid, "blockDim" = block, "sharedMemBytes" = shared_mem_bytes,
            "kernelParams" = kernel_params, "extra" = extra,
        };
        "struct cudaFuncAttributes" = FuncAttributes {
            "sharedSizeBytes" = shared_size_bytes, "constSizeBytes" = const_size_bytes, "localSizeBytes" = local_size_bytes,
            "maxThreadsPerBlock" = max_threads_per_block, "numRegs" = num_regs, "ptxVersion" = ptx_version,
            "binaryVersion" = binary_version, "cacheModeCA" = cache_mode_ca,
            "maxDynamicSharedSizeBytes" = max_dynamic_shared_size_bytes, "preferredShmemCarveout" = preferred_shmem_carveout,
            "clusterDimMustBeSet" = cluster_dim_must_be_set, "requiredClusterWidth" = required_cluster_width,
            "requiredClusterHeight" = required_cluster_height, "requiredClusterDepth" = required_cluster_depth,
            "clusterSchedulingPolicyPreference" = cluster_scheduling_policy_preference,
            "nonPortableClusterSizeAllowed" = non_portable_cluster_size_allowed, "reserved" = reserved,
        };
        "struct cudaTextureDesc" = TextureDesc {
            "addressMode" = address_mode, "filterMode" = filter_mode, "readMode" = read_mode, "sRGB" = srgb,
            "borderColor" = border_color, "normalizedCoords" = normalized_coords, "maxAnisotropy" = max_anisotropy,
            "mipmapFilterMode" = mipmap_filter_mode, "mipmapLevelBias" = mipmap_level_bias,
            "minMipmapLevelClamp" = min_mipmap_level_clamp, "maxMipmapLevelClamp" = max_mipmap_level_clamp,
            "disableTrilinearOptimization" = disable_trilinear_optimization, "seamlessCubemap" = seamless_cubemap,
        };
        "struct cudaResourceDesc" = ResourceDesc { "resType" = kind, "res" = res };
        "struct cudaPointerAttributes" = PointerAttributes {
            "type" = kind, "device" = device, "devicePointer" = device_pointer, "hostPointer" = host_pointer,
        };
        "cudaIpcMemHandle_t" = CUipcMemHandle { "reserved" = reserved };
        "cudaIpcEventHandle_t" = CUipcEventHandle { "reserved" = reserved };
        "struct cudaMemLocation" = CUmemLocation { "type" = kind, "id" = id };
        "struct cudaMemsetParams" = CUDA_MEMSET_NODE_PARAMS {
            "dst" = dst, "pitch" = pitch, "value" = value, "elementSize" = element_size, "width" = width, "height" = height,
        };
        "struct cudaGraphNodeParams" = CUgraphNodeParams { "type" = kind, "kernel" = body, "reserved2" = reserved2 };
    }
    // The 12.8 layouts of these structures end before the reserved words of 13.0, so only the last named
    // field is compared.
    for (c, field, offset) in [
        ("struct cudaResourceViewDesc", "lastLayer", offset_of!(ResourceViewDesc, last_layer)),
        ("struct cudaResourceViewDesc", "firstMipmapLevel", offset_of!(ResourceViewDesc, first_mipmap_level)),
        ("struct cudaExternalMemoryHandleDesc", "handle", offset_of!(ExternalMemoryHandleDesc, handle)),
        ("struct cudaExternalMemoryHandleDesc", "size", offset_of!(ExternalMemoryHandleDesc, size)),
        ("struct cudaExternalMemoryHandleDesc", "flags", offset_of!(ExternalMemoryHandleDesc, flags)),
        ("struct cudaExternalMemoryBufferDesc", "flags", offset_of!(ExternalMemoryBufferDesc, flags)),
        (
            "struct cudaExternalMemoryMipmappedArrayDesc",
            "extent",
            offset_of!(ExternalMemoryMipmappedArrayDesc, extent),
        ),
        (
            "struct cudaExternalMemoryMipmappedArrayDesc",
            "flags",
            offset_of!(ExternalMemoryMipmappedArrayDesc, flags),
        ),
        (
            "struct cudaExternalMemoryMipmappedArrayDesc",
            "numLevels",
            offset_of!(ExternalMemoryMipmappedArrayDesc, num_levels),
        ),
        ("struct cudaExternalSemaphoreHandleDesc", "flags", offset_of!(ExternalSemaphoreHandleDesc, flags)),
    ] {
        writeln!(code, "_Static_assert(offsetof({c}, {field}) == {offset}, \"{c} {field}\");").unwrap();
    }
    compile(&code);
}

#[test]
fn driver_structures_match_the_header() {
    let mut code = String::new();
    same_layout! { code:
        "CUDA_MEMCPY3D" = CUDA_MEMCPY3D {
            "srcXInBytes" = src_x_in_bytes, "srcMemoryType" = src_memory_type, "srcHost" = src_host, "srcDevice" = src_device,
            "srcArray" = src_array, "srcPitch" = src_pitch, "srcHeight" = src_height, "dstXInBytes" = dst_x_in_bytes,
            "dstMemoryType" = dst_memory_type, "dstHost" = dst_host, "dstDevice" = dst_device, "dstArray" = dst_array,
            "dstPitch" = dst_pitch, "dstHeight" = dst_height, "WidthInBytes" = width_in_bytes, "Height" = height, "Depth" = depth,
        };
        "CUDA_MEMCPY3D_PEER" = CUDA_MEMCPY3D { "srcContext" = reserved0, "dstContext" = reserved1, "WidthInBytes" = width_in_bytes };
        "CUDA_ARRAY3D_DESCRIPTOR" = CUDA_ARRAY3D_DESCRIPTOR {
            "Width" = width, "Height" = height, "Depth" = depth, "Format" = format, "NumChannels" = num_channels, "Flags" = flags,
        };
        "CUDA_KERNEL_NODE_PARAMS_v2" = CUDA_KERNEL_NODE_PARAMS {
            "func" = func, "gridDimX" = grid, "blockDimX" = block, "sharedMemBytes" = shared_mem_bytes,
            "kernelParams" = kernel_params, "extra" = extra, "kern" = kern, "ctx" = ctx,
        };
        "CUDA_MEMSET_NODE_PARAMS_v1" = CUDA_MEMSET_NODE_PARAMS { "dst" = dst, "width" = width, "height" = height };
        "CUDA_LAUNCH_PARAMS" = CUDA_LAUNCH_PARAMS {
            "function" = function, "gridDimX" = grid, "blockDimX" = block, "hStream" = stream, "kernelParams" = kernel_params,
        };
        "CUlaunchConfig" = CUlaunchConfig {
            "gridDimX" = grid, "blockDimX" = block, "sharedMemBytes" = shared_mem_bytes, "hStream" = stream, "attrs" = attrs,
            "numAttrs" = num_attrs,
        };
        "CUDA_RESOURCE_DESC" = CUDA_RESOURCE_DESC { "resType" = kind, "res" = res, "flags" = flags };
        "CUDA_TEXTURE_DESC" = CUDA_TEXTURE_DESC {
            "addressMode" = address_mode, "filterMode" = filter_mode, "flags" = flags, "maxAnisotropy" = max_anisotropy,
            "mipmapFilterMode" = mipmap_filter_mode, "mipmapLevelBias" = mipmap_level_bias, "borderColor" = border_color,
        };
        "CUDA_RESOURCE_VIEW_DESC" = CUDA_RESOURCE_VIEW_DESC { "format" = view, "reserved" = reserved };
        "CUDA_EXTERNAL_MEMORY_HANDLE_DESC" = CUDA_EXTERNAL_MEMORY_HANDLE_DESC {
            "type" = kind, "handle" = handle, "size" = size, "flags" = flags, "reserved" = reserved,
        };
        "CUDA_EXTERNAL_MEMORY_BUFFER_DESC" = CUDA_EXTERNAL_MEMORY_BUFFER_DESC { "offset" = offset, "size" = size, "flags" = flags };
        "CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC" = CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC {
            "offset" = offset, "arrayDesc" = array, "numLevels" = num_levels,
        };
        "CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC" = CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC { "type" = kind, "handle" = handle, "flags" = flags };
        "CUgraphNodeParams" = CUgraphNodeParams { "type" = kind, "kernel" = body, "reserved2" = reserved2 };
        "CUuuid" = CUuuid { "bytes" = bytes };
    }
    compile(&code);
}

#[test]
fn structures_passed_through_unread_are_the_same_in_both_apis() {
    let mut code = String::new();
    for (runtime, driver, fields) in [
        (
            "struct cudaMemPoolProps",
            "CUmemPoolProps",
            &["allocType", "handleTypes", "location", "maxSize", "usage"][..],
        ),
        ("struct cudaMemAccessDesc", "CUmemAccessDesc", &["location", "flags"]),
        ("struct cudaMemPoolPtrExportData", "CUmemPoolPtrExportData", &["reserved"]),
        (
            "struct cudaMemcpyAttributes",
            "CUmemcpyAttributes",
            &["srcAccessOrder", "srcLocHint", "dstLocHint", "flags"],
        ),
        (
            "struct cudaMemcpy3DBatchOp",
            "CUDA_MEMCPY3D_BATCH_OP",
            &["src", "dst", "extent", "srcAccessOrder", "flags"],
        ),
        ("struct cudaArrayMemoryRequirements", "CUDA_ARRAY_MEMORY_REQUIREMENTS", &["size", "alignment"]),
        (
            "struct cudaArraySparseProperties",
            "CUDA_ARRAY_SPARSE_PROPERTIES",
            &["tileExtent", "miptailFirstLevel", "miptailSize", "flags"],
        ),
        (
            "struct cudaExternalSemaphoreSignalParams",
            "CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS",
            &["params", "flags"],
        ),
        (
            "struct cudaExternalSemaphoreWaitParams",
            "CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS",
            &["params", "flags"],
        ),
        (
            "struct cudaExternalSemaphoreSignalNodeParams",
            "CUDA_EXT_SEM_SIGNAL_NODE_PARAMS",
            &["extSemArray", "paramsArray", "numExtSems"],
        ),
        (
            "struct cudaExternalSemaphoreWaitNodeParams",
            "CUDA_EXT_SEM_WAIT_NODE_PARAMS",
            &["extSemArray", "paramsArray", "numExtSems"],
        ),
        ("struct cudaHostNodeParams", "CUDA_HOST_NODE_PARAMS", &["fn", "userData"]),
        (
            "struct cudaMemAllocNodeParams",
            "CUDA_MEM_ALLOC_NODE_PARAMS",
            &["poolProps", "accessDescs", "accessDescCount", "bytesize", "dptr"],
        ),
        ("cudaGraphEdgeData", "CUgraphEdgeData", &["from_port", "to_port", "type"]),
        (
            "cudaGraphExecUpdateResultInfo",
            "CUgraphExecUpdateResultInfo",
            &["result", "errorNode", "errorFromNode"],
        ),
        ("cudaLaunchAttribute", "CUlaunchAttribute", &["id"]),
        (
            "cudaLaunchAttributeValue",
            "CUlaunchAttributeValue",
            &["accessPolicyWindow", "clusterDim", "programmaticEvent"],
        ),
    ] {
        writeln!(code, "_Static_assert(sizeof({runtime}) == sizeof({driver}), \"{runtime}\");").unwrap();
        for field in fields {
            writeln!(code, "_Static_assert(offsetof({runtime}, {field}) == offsetof({driver}, {field}), \"{runtime} {field}\");").unwrap();
        }
    }
    writeln!(code, "_Static_assert(sizeof(cudaGraphInstantiateParams) == sizeof(CUDA_GRAPH_INSTANTIATE_PARAMS), \"instantiate\");").unwrap();
    compile(&code);
}

/// How this library passes an argument of a Rust type.
fn class_of_rust(kind: &str) -> Class {
    let kind = kind.trim().trim_start_matches("crate::types::");
    match kind {
        "c_int" | "c_uint" | "Count<c_int>" | "Count<c_uint>" => Class::Integer(4),
        "usize" | "u64" => Class::Integer(8),
        "f32" => Class::Float(4),
        "Dim3" => Class::Record(size_of::<Dim3>()),
        "Extent" => Class::Record(size_of::<Extent>()),
        "PitchedPtr" => Class::Record(size_of::<PitchedPtr>()),
        "CUmemLocation" => Class::Record(size_of::<CUmemLocation>()),
        "CUipcMemHandle" => Class::Record(size_of::<CUipcMemHandle>()),
        "CUipcEventHandle" => Class::Record(size_of::<CUipcEventHandle>()),
        _ if ["*", "CU", "Out<", "In<", "Array<"].iter().any(|pointer| kind.starts_with(pointer)) => {
            Class::Pointer
        }
        _ => panic!("an argument of type {kind}"),
    }
}

/// The functions that this version's `api!` blocks declare, with the classes of their arguments.
fn declared_functions() -> Vec<(String, Vec<Class>)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("src")).expect("src") {
        let path = entry.expect("an entry").path();
        let only_12 = path.ends_with("cuda12.rs");
        if path.is_dir() || path.ends_with("macros.rs") || (only_12 && !cfg!(feature = "v12")) {
            continue;
        }
        let text = fs::read_to_string(&path).expect("text");
        for (at, _) in text.match_indices("\napi! {") {
            let before = text[..at].rsplit('\n').next().unwrap_or_default();
            if before
                == if cfg!(feature = "v12") {
                    "#[cfg(not(feature = \"v12\"))]"
                } else {
                    "#[cfg(feature = \"v12\")]"
                }
            {
                continue;
            }
            let block = text[at..].split("\n}").next().unwrap_or_default();
            for entry in block.split("\n    ").map(str::trim_start) {
                let Some(entry) = ["ctx ", "init ", "raw "].iter().find_map(|need| entry.strip_prefix(need))
                else {
                    continue;
                };
                let name = entry
                    .trim_start_matches("unsafe ")
                    .trim_start_matches("fn ")
                    .split(['(', '/', ' '])
                    .next()
                    .unwrap_or_default()
                    .to_owned();
                let start = block.find(entry).expect("a part of the block");
                let open = block[start..].find('(').expect("arguments");
                let arguments = split(bracketed(&block[start + open..]));
                let kinds = arguments
                    .into_iter()
                    .map(|argument| class_of_rust(argument.split_once(':').expect("a name and a type").1));
                found.push((name, kinds.collect()));
            }
        }
    }
    found
}

#[test]
fn function_arguments_match_the_headers() {
    let includes = &nvidia().includes;
    let declared = prototypes(includes, "cuda_runtime_api.h", &[], "cudaError_t");
    let scratch = tempfile::tempdir().expect("a temporary folder");
    let types = declared.values().flatten().cloned().collect();
    let classes = classes(includes, "cuda_runtime_api.h", &[], types, scratch.path());
    let mut compared = 0;
    for (name, ours) in declared_functions() {
        let Some(arguments) = declared.get(&name) else { continue };
        let theirs: Vec<Class> = arguments.iter().map(|kind| classes[kind]).collect();
        assert_eq!(ours, theirs, "{name}: {arguments:?}");
        compared += 1;
    }
    // Everything except functions that return no error, functions missing from the header, and those exported
    // by `unsupported!` or as plain functions.
    assert!(compared > 290, "{compared} functions were compared");
}

/// A field's name reduced to letters and digits, because C and Rust spell names differently.
fn bare(name: &str) -> String {
    name.replace('_', "").to_ascii_lowercase()
}

#[test]
fn device_properties_match_the_header() {
    let header =
        nvidia().includes.iter().map(|include| include.join("driver_types.h")).find(|path| path.exists());
    let text = fs::read_to_string(header.expect("driver_types.h")).expect("text");
    let body = text
        .split("struct __device_builtin__ cudaDeviceProp")
        .nth(1)
        .and_then(|rest| rest.split("};").next())
        .expect("the structure");
    let declarations = body
        .split(';')
        .filter_map(|part| part.rsplit("*/").next()?.split('[').next()?.split_whitespace().last());
    let names: Vec<&str> = declarations.collect();
    let mut code = String::new();
    writeln!(code, "_Static_assert(sizeof(struct cudaDeviceProp) == {}, \"size\");", size_of::<DeviceProp>())
        .unwrap();
    for &(field, offset) in properties::FIELDS {
        let c = names
            .iter()
            .find(|name| bare(name) == bare(field))
            .unwrap_or_else(|| panic!("the header has no {field}"));
        writeln!(code, "_Static_assert(offsetof(struct cudaDeviceProp, {c}) == {offset}, \"{c}\");").unwrap();
    }
    compile(&code);
}

#[test]
fn error_names_and_texts_match_nvidias_library() {
    type Text = unsafe extern "C" fn(c_int) -> *const c_char;
    let path = CString::new(nvidia().library.as_os_str().as_bytes()).expect("a path");
    // SAFETY: Opening NVIDIA's library has no side effects. Both functions accept any number and return
    // static text, as their declared signature says.
    unsafe {
        let library = libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL);
        assert!(!library.is_null());
        let function = |name: &CStr| {
            let address = libc::dlsym(library, name.as_ptr());
            assert!(!address.is_null(), "{name:?}");
            std::mem::transmute::<*mut c_void, Text>(address)
        };
        let (name, text) = (function(c"cudaGetErrorName"), function(c"cudaGetErrorString"));
        for error in -1..10_100 {
            assert_eq!(CStr::from_ptr(cudaGetErrorName(error)), CStr::from_ptr(name(error)));
            assert_eq!(CStr::from_ptr(cudaGetErrorString(error)), CStr::from_ptr(text(error)));
        }
    }
}

#[test]
fn exports_match_nvidias_library() {
    let version = if cfg!(feature = "v12") { 12 } else { 13 };
    let output = run(Command::new("nm")
        .args(["--dynamic", "--defined-only", "--with-symbol-versions"])
        .arg(&nvidia().library));
    let mut theirs: Vec<String> = output
        .lines()
        .filter_map(|line| {
            line.split_whitespace()
                .last()?
                .strip_suffix(&format!("@@libcudart.so.{version}"))
                .map(str::to_owned)
        })
        .collect();
    theirs.sort();
    let list = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("exports/{version}.txt"));
    let mut ours: Vec<String> =
        fs::read_to_string(list).expect("the list").lines().map(str::to_owned).collect();
    ours.sort();
    assert_eq!(ours, theirs);
}
