//! Functions that cannot be served: OpenGL, EGL and VDPAU need a display in this machine, and some of the
//! runtime's names are undocumented.

unsupported! {
    cudaGLGetDevices: "OpenGL needs a GPU in this machine";
    cudaGLMapBufferObject: "OpenGL needs a GPU in this machine";
    cudaGLMapBufferObjectAsync: "OpenGL needs a GPU in this machine";
    cudaGLRegisterBufferObject: "OpenGL needs a GPU in this machine";
    cudaGLSetBufferObjectMapFlags: "OpenGL needs a GPU in this machine";
    cudaGLSetGLDevice: "OpenGL needs a GPU in this machine";
    cudaGLUnmapBufferObject: "OpenGL needs a GPU in this machine";
    cudaGLUnmapBufferObjectAsync: "OpenGL needs a GPU in this machine";
    cudaGLUnregisterBufferObject: "OpenGL needs a GPU in this machine";
    cudaGraphicsGLRegisterBuffer: "OpenGL needs a GPU in this machine";
    cudaGraphicsGLRegisterImage: "OpenGL needs a GPU in this machine";
    cudaEGLStreamConsumerAcquireFrame: "EGL needs a GPU in this machine";
    cudaEGLStreamConsumerConnect: "EGL needs a GPU in this machine";
    cudaEGLStreamConsumerConnectWithFlags: "EGL needs a GPU in this machine";
    cudaEGLStreamConsumerDisconnect: "EGL needs a GPU in this machine";
    cudaEGLStreamConsumerReleaseFrame: "EGL needs a GPU in this machine";
    cudaEGLStreamProducerConnect: "EGL needs a GPU in this machine";
    cudaEGLStreamProducerDisconnect: "EGL needs a GPU in this machine";
    cudaEGLStreamProducerPresentFrame: "EGL needs a GPU in this machine";
    cudaEGLStreamProducerReturnFrame: "EGL needs a GPU in this machine";
    cudaEventCreateFromEGLSync: "EGL needs a GPU in this machine";
    cudaGraphicsEGLRegisterImage: "EGL needs a GPU in this machine";
    cudaGraphicsResourceGetMappedEglFrame: "EGL needs a GPU in this machine";
    cudaVDPAUGetDevice: "VDPAU needs a GPU in this machine";
    cudaVDPAUSetVDPAUDevice: "VDPAU needs a GPU in this machine";
    cudaGraphicsVDPAURegisterOutputSurface: "VDPAU needs a GPU in this machine";
    cudaGraphicsVDPAURegisterVideoSurface: "VDPAU needs a GPU in this machine";
    __cudaRegisterUnifiedTable: "its arguments are not documented";
}

#[cfg(not(feature = "v12"))]
unsupported! {
    __cudaGetProcAddress: "its arguments are not documented";
}
