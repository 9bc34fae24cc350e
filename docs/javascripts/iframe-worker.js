/* A page without a server may start no Worker: here its script runs in a hidden frame, so that search works. */
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.documentElement.append(frame)
      const inside = frame.contentWindow
      const load = source => new Promise(done => {
        const script = inside.document.createElement("script")
        script.src = source
        script.onload = done
        inside.document.head.append(script)
      })
      inside.IFrameWorker = window.IFrameWorker
      inside.importScripts = (...sources) => Promise.all(sources.map(load))
      inside.postMessage = data => {
        const event = new MessageEvent("message", { data })
        this.dispatchEvent(event)
        this.onmessage?.(event)
      }
      this.postMessage = data =>
        this.ready.then(() => inside.dispatchEvent(new inside.MessageEvent("message", { data })))
      this.ready = load(url)
    }
  }
}
