//! Compares the layouts with NVIDIA's header, as the C compiler lays it out.

mod includes;

use std::fmt::Write as _;
use std::process::Command;

use cupti_records::{channel, copy, external, kind, memory};

/// Compiles a program with `body` in its `main` and returns what it prints.
fn run(body: &str) -> String {
    let scratch = tempfile::tempdir().expect("a temporary folder");
    let (source, program) = (scratch.path().join("a.c"), scratch.path().join("a"));
    let code = format!(
        "#include <cuda.h>\n#include <cupti.h>\n#include <stddef.h>\n#include <stdio.h>\n#define SIZE(t, f) sizeof(((t *)0)->f)\nint main(void) {{\n{body}return 0; }}\n"
    );
    std::fs::write(&source, code).expect("a file");
    let compiled =
        Command::new("gcc").arg("-I").arg(includes::folder()).arg(&source).arg("-o").arg(&program).output();
    let compiled = compiled.expect("gcc");
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let output = Command::new(&program).output().expect("the program that was compiled");
    String::from_utf8(output.stdout).expect("UTF-8")
}

#[test]
fn the_fields_of_records_are_where_the_header_has_them() {
    let (mut body, mut ours) = (String::new(), String::new());
    for (record, size, fields) in cupti_records::layouts() {
        writeln!(body, "printf(\"{record} %zu\\n\", sizeof({record}));").expect("a string grows");
        writeln!(ours, "{record} {size}").expect("a string grows");
        for (field, offset, size) in fields {
            writeln!(
                body,
                "printf(\"  {field} %zu %zu\\n\", offsetof({record}, {field}), SIZE({record}, {field}));"
            )
            .expect("a string grows");
            writeln!(ours, "  {field} {offset} {size}").expect("a string grows");
        }
    }
    assert_eq!(run(&body), ours);
}

#[test]
fn numbers_are_those_of_the_header() {
    let numbers = [
        ("CUPTI_ACTIVITY_KIND_MEMCPY", kind::MEMCPY),
        ("CUPTI_ACTIVITY_KIND_MEMSET", kind::MEMSET),
        ("CUPTI_ACTIVITY_KIND_KERNEL", kind::KERNEL),
        ("CUPTI_ACTIVITY_KIND_DRIVER", kind::DRIVER),
        ("CUPTI_ACTIVITY_KIND_RUNTIME", kind::RUNTIME),
        ("CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL", kind::CONCURRENT_KERNEL),
        ("CUPTI_ACTIVITY_KIND_OVERHEAD", kind::OVERHEAD),
        ("CUPTI_ACTIVITY_KIND_MEMCPY2", kind::MEMCPY2),
        ("CUPTI_ACTIVITY_KIND_CUDA_EVENT", kind::CUDA_EVENT),
        ("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", kind::SYNCHRONIZATION),
        ("CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION", kind::EXTERNAL_CORRELATION),
        ("CUPTI_ACTIVITY_KIND_COUNT", kind::COUNT),
        ("CUPTI_ACTIVITY_MEMCPY_KIND_HTOD", copy::HTOD.into()),
        ("CUPTI_ACTIVITY_MEMCPY_KIND_DTOH", copy::DTOH.into()),
        ("CUPTI_ACTIVITY_MEMCPY_KIND_ATOA", copy::ATOA.into()),
        ("CUPTI_ACTIVITY_MEMCPY_KIND_ATOD", copy::ATOD.into()),
        ("CUPTI_ACTIVITY_MEMCPY_KIND_DTOA", copy::DTOA.into()),
        ("CUPTI_ACTIVITY_MEMCPY_KIND_DTOD", copy::DTOD.into()),
        ("CUPTI_ACTIVITY_MEMCPY_KIND_PTOP", copy::PTOP.into()),
        ("CUPTI_ACTIVITY_MEMORY_KIND_PAGEABLE", memory::PAGEABLE.into()),
        ("CUPTI_ACTIVITY_MEMORY_KIND_PINNED", memory::PINNED.into()),
        ("CUPTI_ACTIVITY_MEMORY_KIND_DEVICE", memory::DEVICE.into()),
        ("CUPTI_ACTIVITY_MEMORY_KIND_ARRAY", memory::ARRAY.into()),
        ("CUPTI_ACTIVITY_FLAG_FLUSH_FORCED", cupti_records::flag::FLUSH_FORCED),
        (
            "CUPTI_ACTIVITY_ATTR_PER_THREAD_ACTIVITY_BUFFER",
            cupti_records::attribute::PER_THREAD_ACTIVITY_BUFFER,
        ),
        ("CUPTI_ACTIVITY_ATTR_DEVICE_BUFFER_SIZE_DEVICE_GRAPHS", cupti_records::attribute::LAST),
        ("CUPTI_EXTERNAL_CORRELATION_KIND_UNKNOWN", external::UNKNOWN),
        ("CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0", external::CUSTOM0),
        ("CUPTI_EXTERNAL_CORRELATION_KIND_SIZE", external::SIZE),
        ("CUPTI_CHANNEL_TYPE_COMPUTE", channel::COMPUTE),
        ("CUPTI_CHANNEL_TYPE_ASYNC_MEMCPY", channel::ASYNC_MEMCPY),
    ];
    let (mut body, mut ours) = (String::new(), String::new());
    for (name, number) in numbers {
        writeln!(body, "printf(\"{name} %d\\n\", (int){name});").expect("a string grows");
        writeln!(ours, "{name} {number}").expect("a string grows");
    }
    assert_eq!(run(&body), ours);
}
