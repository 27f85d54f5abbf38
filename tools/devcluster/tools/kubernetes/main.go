// Command kubernetes is etcd and each daemon of Kubernetes, depending on the name that it is called by.
// They share most of their packages: built as one program, these are compiled and linked once.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	_ "time/tzdata" // time zones of CronJobs

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllers "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

func main() {
	switch name := filepath.Base(os.Args[0]); name {
	case "etcd":
		etcdmain.Main(os.Args)
	case "kube-apiserver":
		run(apiserver.NewAPIServerCommand())
	case "kube-controller-manager":
		run(controllers.NewControllerManagerCommand())
	case "kube-scheduler":
		run(scheduler.NewSchedulerCommand())
	case "kubelet":
		run(kubelet.NewKubeletCommand(context.Background()))
	case "kube-proxy":
		run(proxy.NewProxyCommand())
	default:
		fmt.Fprintf(os.Stderr, "%s: not a program of a cluster\n", name)
		os.Exit(1)
	}
}

func run(command *cobra.Command) {
	os.Exit(cli.Run(command))
}
