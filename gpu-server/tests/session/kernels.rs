//! Modules and their kernels.

use super::*;

#[test]
fn a_program_runs_from_its_first_call_to_its_result() {
    fn body<S: Session>(s: &mut S) {
        let info = s.call(&SessionInfo {}).unwrap();
        assert_eq!(info.backend, backend());
        let device = s.call(&DeviceInfo { device: 0 }).unwrap();
        assert_eq!(device.granule, 2 << 20);
        assert_eq!(s.call(&DeviceInfo { device: info.device_count }).unwrap_err(), Status::INVALID_DEVICE);
        grow(s, 64 << 10);
        assert_eq!(load(s), ["scale", "crash"]);
        let input: Vec<u8> = (0..16384u32).flat_map(|i| i.to_le_bytes()).collect();
        let src = s.arena(0, &input);
        s.push(&StreamCreate { context: ContextId(0), stream: StreamId(MADE), flags: 0, priority: 0 });
        s.push(&MemcpyHtoD { stream: StreamId(MADE), dst: BASE, src: HostIn::Range(src) });
        for _ in 0..3 {
            launch(s, MADE, 0, &params(BASE, 3, 16384));
        }
        let dst = s.arena(1 << 20, &[0xaa; 64 << 10]);
        s.push(&MemcpyDtoH { stream: StreamId(MADE), src: BASE, dst: HostOut(dst) });
        s.call(&StreamSynchronize { stream: StreamId(MADE) }).unwrap();
        let output = s.read_arena(1 << 20, 64 << 10);
        for (i, value) in output.chunks_exact(4).enumerate() {
            assert_eq!(u32::from_le_bytes(value.try_into().unwrap()), i as u32 * 27);
        }
        let bytes = s.call(&MemcpyDtoHInline { stream: StreamId(0), src: BASE + 4, len: 8 }).unwrap().bytes.0;
        assert_eq!(bytes, [27, 0, 0, 0, 54, 0, 0, 0]);
        assert_eq!(s.error(0), None);
    }
    on_each_transport!(Server::start(&[]), body);
}

/// Loads the image whose functions the client binds itself.
fn load_by_name<S: Session>(s: &mut S, image: &str) -> u32 {
    let image = HostIn::Inline(image.as_bytes());
    s.call(&ModuleLoadByName { context: ContextId(0), module: ModuleId(1), image }).unwrap().result
}

fn bind<S: Session>(s: &mut S, index: u32, name: &str, params: &[(u32, u32)]) {
    let params = params.iter().map(|&(offset, size)| Param { offset, size }).collect();
    s.push(&FunctionBind { function: FunctionId::new(ModuleId(1), index), name, params });
}

const SCALE: [(u32, u32); 3] = [(0, 8), (8, 4), (12, 4)];

#[test]
fn functions_are_bound_in_the_order_of_their_first_use() {
    fn body<S: Session>(s: &mut S) {
        grow(s, 4096);
        assert_eq!(load_by_name(s, PTX), 0);
        bind(s, 0, "crash", &[(0, 8)]);
        bind(s, 1, "scale", &SCALE);
        s.push(&MemcpyHtoD { stream: StreamId(0), dst: BASE, src: HostIn::Inline(&[5, 0, 0, 0]) });
        launch(s, 0, 1, &params(BASE, 3, 1));
        let bytes = s.call(&MemcpyDtoHInline { stream: StreamId(0), src: BASE, len: 4 }).unwrap().bytes.0;
        assert_eq!((bytes, s.error(0)), (vec![15, 0, 0, 0], None));
        // The next one would be the third.
        for index in [0, 1, 3, u32::MAX] {
            bind(s, index, "scale", &SCALE);
        }
        s.call(&MemGetInfo { device: 0 }).unwrap();
        assert_eq!(s.error(0), Some((Status::INVALID_HANDLE, false)));
    }
    on_each_transport!(Server::start(&[]), body);
}

#[test]
fn a_kernel_is_not_launched_with_parameters_in_other_places() {
    fn body<S: Session>(s: &mut S) {
        grow(s, 4096);
        assert_eq!(load_by_name(s, PTX), 0);
        bind(s, 0, "scale", &[(0, 8), (8, 8), (16, 4)]);
        s.push(&MemcpyHtoD { stream: StreamId(0), dst: BASE, src: HostIn::Inline(&[5, 0, 0, 0]) });
        launch(s, 0, 0, &params(BASE, 3, 1));
        let bytes = s.call(&MemcpyDtoHInline { stream: StreamId(0), src: BASE, len: 4 }).unwrap().bytes.0;
        assert_eq!(bytes, [5, 0, 0, 0]);
        assert_eq!(s.error(0), Some((Status::INVALID_IMAGE, false)));
    }
    on_each_transport!(Server::start(&[]), body);
}

#[test]
fn what_follows_a_load_that_failed_fails_with_its_status() {
    fn body<S: Session>(s: &mut S) {
        let refused = load_by_name(s, ".version 8.0\n.target sm_90\n.address_size 64\nthis is no PTX\n");
        assert_ne!(refused, 0);
        bind(s, 0, "scale", &SCALE);
        launch(s, 0, 0, &params(BASE, 3, 1));
        let function = FunctionId::new(ModuleId(1), 0);
        assert_eq!(s.call(&FunctionAttributes { function }).unwrap_err(), Status(refused));
        assert_eq!(s.error(0), Some((Status(refused), false)));
        s.push(&ModuleUnload { module: ModuleId(1) });
        assert_eq!(s.call(&FunctionAttributes { function }).unwrap_err(), Status::INVALID_HANDLE);
    }
    on_each_transport!(Server::start(&[]), body);
}
