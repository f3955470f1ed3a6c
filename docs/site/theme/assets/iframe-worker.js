// Browsers start no worker from a page that is opened as a file. There, the worker of the search runs in a hidden frame, and
// finds its files by the name IFrameWorker.
if (location.protocol === "file:")
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const inner = (this.inner = this.frame.contentWindow)
      const load = address =>
        new Promise((done, fail) => {
          const script = inner.document.createElement("script")
          script.src = new URL(address, document.baseURI)
          script.onload = done
          script.onerror = fail
          inner.document.body.append(script)
        })
      inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      inner.importScripts = (...addresses) =>
        addresses.reduce((before, address) => before.then(() => load(address)), Promise.resolve())
      this.ready = load(url)
    }
    postMessage(data) {
      this.ready.then(() => this.inner.dispatchEvent(new this.inner.MessageEvent("message", { data })))
    }
    terminate() {
      this.frame.remove()
    }
  }
